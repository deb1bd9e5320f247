from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import pytest

from engine.config import (
    OPTIONS,
    ServeConfig,
    add_arguments,
    banner,
    format_duration,
    format_size,
    parse_size,
    resolve,
)
from engine.errors import ConfigError


def from_cli(*words: str, env: dict[str, str] | None = None) -> ServeConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return resolve(vars(parser.parse_args(words)), env or {})


@pytest.mark.parametrize(("text", "size"), [
    ("1GiB", 2**30), ("768MiB", 768 * 2**20), ("512MB", 512_000_000), ("1.5GiB", 3 * 2**29), ("64 KiB", 65536),
    ("2gib", 2**31), ("4096", 4096), ("1TB", 10**12), ("10B", 10)])
def test_sizes_with_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1G", "1 giga", "-1GiB", "0", "0GiB", "1e9", "nan", "1GiB x"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--hbm.*1GiB, 768MiB or 512MB"):
        from_cli(f"--hbm={text}")


def test_sizes_are_shown_exactly() -> None:
    assert [format_size(n) for n in (2**30, 3 * 2**29, 512_000_000, 1000)] == [
        "1 GiB", "1536 MiB", "500000 KiB", "1000 bytes"]


def test_defaults() -> None:
    config = from_cli()
    assert config == ServeConfig()
    assert (config.model, config.host, config.port, config.hbm) == ("smollm2", "127.0.0.1", 8000, 2**30)
    assert (config.block_size, config.step_tokens, config.max_running) == (16, 512, 16)
    assert (config.dtype, config.max_waiting, config.max_body) == ("auto", 1024, 32 * 2**20)


#: A value for each option that is not its default: as text, and as the configuration holds it.
OTHERS: dict[str, tuple[str, object]] = {
    "model": ("org/name", "org/name"), "served_model_name": ("m", "m"), "alias": ("gpt-4o", ("gpt-4o",)),
    "host": ("0.0.0.0", "0.0.0.0"), "port": ("0", 0), "hbm": ("2GiB", 2**31), "dtype": ("float32", "float32"),
    "max_context": ("2048", 2048), "block_size": ("32", 32), "step_tokens": ("256", 256),
    "max_running": ("4", 4), "max_waiting": ("7", 7), "threads": ("2", 2), "device": ("cpu", "cpu"),
    "chat_template": ("t.jinja", Path("t.jinja")), "api_key": ("k", ("k",)), "max_body": ("1MiB", 2**20),
    "log_level": ("debug", "debug"), "ram": ("256MiB", 2**28), "nvme": ("cache", Path("cache")),
    "nvme_size": ("20GiB", 20 * 2**30), "persist_within": ("500ms", 0.5), "nvme_write_limit": ("64MB/s", 64_000_000),
    "session_idle": ("1h", 3600.0), "secret_file": ("key", Path("key")),
}
#: What must be given beside an option, or it is refused.
WITH = {"nvme": {"nvme_size": "1GiB"}, "nvme_size": {"nvme": "cache"},
        "nvme_write_limit": {"nvme": "c", "nvme_size": "1GiB"}}


def test_each_option_by_command_line_environment_and_file(tmp_path: Path) -> None:
    assert OTHERS.keys() | {"config"} == OPTIONS.keys()
    assert {f.name for f in fields(ServeConfig)} - {"sources", "notes"} == OPTIONS.keys()
    for name, (text, value) in OTHERS.items():
        option = OPTIONS[name]
        beside = WITH.get(name, {})
        flags = [word for other, said in beside.items() for word in (OPTIONS[other].flag, said)]
        assert getattr(from_cli(option.flag, text, *flags), name) == value
        by_env = from_cli(*flags, env={option.env: text})
        assert getattr(by_env, name) == value
        assert by_env.sources[name] == f"environment, {option.env}"
        assert by_env.sources.keys() == {name, *beside}
        file = tmp_path / f"{name}.toml"
        file.write_text("".join(f'{n.replace("_", "-")} = "{t}"\n' for n, t in {name: text, **beside}.items()))
        by_file = from_cli("--config", str(file))
        assert getattr(by_file, name) == value
        assert by_file.sources[name] == f"file {file}"


def test_command_line_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("port = 1\nmax_running = 1\nblock-size = 32\n")
    config = from_cli("--config", str(file), "--port", "3",
                      env={"TRUNKLINE_PORT": "2", "TRUNKLINE_MAX_RUNNING": "2"})
    assert (config.port, config.max_running, config.block_size, config.step_tokens) == (3, 2, 32, 512)
    assert from_cli(env={"TRUNKLINE_CONFIG": str(file)}).port == 1


def test_repeatable_options(tmp_path: Path) -> None:
    assert from_cli("--alias", "a", "--alias", "b").alias == ("a", "b")
    assert from_cli(env={"TRUNKLINE_API_KEY": "k1, k2,"}).api_key == ("k1", "k2")
    file = tmp_path / "a.toml"
    file.write_text('alias = ["a", "b"]\n')
    assert from_cli("--config", str(file)).alias == ("a", "b")


@pytest.mark.parametrize(("words", "said"), [
    (["--port", "99999"], r"--port: '99999' \(from the command line\) is not a whole number from 0 to 65535"),
    (["--port", "x"], "--port"), (["--dtype", "int8"], "one of auto, bfloat16, float32"),
    (["--block-size", "24"], "--block-size.*16, 32"), (["--max-running", "0"], "--max-running"),
    (["--threads", "0"], "--threads"), (["--max-context", "-1"], "--max-context"),
    (["--device", "cuda"], "--device: 'cuda'.*cpu"), (["--model", ""], "--model.*not empty"),
    (["--log-level", "loud"], "debug, info, warning, error"), (["--alias", " "], "--alias"),
])
def test_a_bad_value_names_option_value_and_what_is_allowed(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_cli(*words)


def test_a_bad_value_in_the_environment_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"--hbm: '3x' \(from the environment, TRUNKLINE_HBM\)"):
        from_cli(env={"TRUNKLINE_HBM": "3x"})
    with pytest.raises(ConfigError, match="Kubernetes"):
        from_cli(env={"TRUNKLINE_PORT": "tcp://10.0.0.1:80"})


@pytest.mark.parametrize(("toml", "said"), [
    ("hbn = 1", r"'hbn' \(did you mean hbm\?\)"), ("wholly-other = 1", "there is no option 'wholly-other'"),
    ("config = 'x'", "there is no option 'config'"), ("hbm = ", "not a TOML file"),
    ("[server]\nport = 1", "there is no option 'server'"), ("port = true", "--port.*a text or a whole number"),
    ("port = 1.5", "--port"), ("port = [1]", "--port"), ("max-body = 1\nmax_body = 2", "set twice"),
    ("port = 99999", r"--port: 99999 \(from the file .*\) is not"), ("alias = [1.5]", "--alias"),
])
def test_a_file_with_a_mistake_is_refused(tmp_path: Path, toml: str, said: str) -> None:
    file = tmp_path / "a.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError, match=said):
        from_cli("--config", str(file))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.toml: can't be read: No such file"):
        from_cli("--config", str(tmp_path / "nope.toml"))


def test_keys_are_shown_nowhere() -> None:
    config = from_cli("--api-key", "very-secret")
    assert "very-secret" not in "\n".join(banner(config)) + repr(config)
    with pytest.raises(ConfigError) as found:
        resolve({"api_key": ["very-secret", ""]}, {})
    assert "very-secret" not in str(found.value)


def test_the_banner_tells_value_and_source_of_each() -> None:
    lines = banner(from_cli("--hbm", "2GiB"))
    assert len(lines) == len(OPTIONS)
    assert next(line for line in lines if "--hbm" in line).split() == ["--hbm", "2", "GiB", "(command", "line)"]
    assert all(line.endswith("(default)") for line in lines if "--hbm" not in line)


def test_help_has_default_and_variable_of_each() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    text = " ".join(parser.format_help().split())
    for option in OPTIONS.values():
        assert f"env {option.env}" in text
        assert f"[default: {option.default_text};" in text


def test_a_variable_that_is_no_option_is_noted_and_ours_are_not() -> None:
    config = from_cli(env={"TRUNKLINE_CACHE": "/x", "TRUNKLINE_SERVICE_HOST": "10.0.0.1", "TRUNKLINE_HMB": "1"})
    assert len(config.notes) == 2
    assert "TRUNKLINE_HMB" in config.notes[0]
    assert "did you mean TRUNKLINE_HBM?" in config.notes[0]


@pytest.mark.parametrize(("words", "said"), [
    (["--hbm", "9" * 5000], "--hbm.*a size"), (["--hbm", "9" * 18 + ".5TiB"], "--hbm.*less than 8 EiB"),
    (["--hbm", "999999999TiB"], "--hbm.*less than 8 EiB"), (["--config", "~no-such-user/x"], "--config.*home folder"),
    (["--chat-template", "~no-such-user/x"], "--chat-template.*home folder"), (["--host", "a\0b"], "--host.*control"),
    (["--alias", "a\udcff"], "--alias.*UTF-8"), (["--api-key", "a\udcff"], "--api-key.*UTF-8"),
    (["--api-key", " a"], "--api-key.*spaces"), (["--model", "x\n"], "--model.*control"),
])
def test_a_value_that_python_itself_would_choke_on_is_refused_like_any_other(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as found:
        from_cli(*words)
    assert len(found.value.message) < 500


@pytest.mark.parametrize("toml", ["x = " + "[" * 5000, f"port = {'9' * 5000}", 'model = "a\\u0000b"'])
def test_a_hostile_file_is_refused_without_a_traceback(tmp_path: Path, toml: str) -> None:
    file = tmp_path / "a.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError, match=r"not a TOML file|--model"):
        from_cli("--config", str(file))


def test_a_config_file_named_in_the_environment_is_said_to_come_from_there() -> None:
    with pytest.raises(ConfigError, match=r"from the environment, TRUNKLINE_CONFIG"):
        from_cli(env={"TRUNKLINE_CONFIG": "~no-such-user/x"})


@pytest.mark.parametrize(("text", "seconds"), [
    ("2", 2.0), ("0.5", 0.5), ("2s", 2.0), ("500ms", 0.5), ("10m", 600.0), ("1.5h", 5400.0), ("0", 0.0),
    ("10 min", 600.0)])
def test_times_with_units(text: str, seconds: float) -> None:
    assert from_cli("--session-idle", text).session_idle == seconds


@pytest.mark.parametrize("text", ["", "m", "-1", "1d", "nan", "inf", "1e3", "400000000", "10m 5s"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--session-idle.*500ms, 2s, 10m"):
        from_cli(f"--session-idle={text}")


@pytest.mark.parametrize(("seconds", "text"), [(600.0, "10m"), (2.0, "2s"), (0.5, "500ms"), (90.0, "90s"), (0.0, "0s")])
def test_times_are_shown_exactly(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_ram_may_be_none() -> None:
    assert from_cli("--ram", "0").ram == 0
    assert from_cli("--ram", "0GiB").ram == 0
    with pytest.raises(ConfigError, match=r"--ram: 'much'.*or 0 for none"):
        from_cli("--ram", "much")


def test_a_folder_for_the_nvme_tier_needs_a_size() -> None:
    with pytest.raises(ConfigError, match=r"--nvme cache needs --nvme-size.*--nvme-size 20GiB"):
        from_cli("--nvme", "cache")


@pytest.mark.parametrize(("flag", "value"), [("--nvme-size", "1GiB"), ("--nvme-write-limit", "64MB/s")])
def test_what_is_said_of_an_nvme_tier_needs_its_folder(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{flag} .*does nothing without --nvme DIR"):
        from_cli(flag, value)


@pytest.mark.parametrize("text", ["fast", "64MB/m", "0", "-1MB/s"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--nvme-write-limit.*64MB/s"):
        from_cli("--nvme", "c", "--nvme-size", "1GiB", f"--nvme-write-limit={text}")
