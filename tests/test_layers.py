"""The walls between the rooms: what each module may import, how long a file may be, what no file may name.

The import linter (`make lint`) holds the arrows between our own packages; here is the rest. Each module is
imported alone, with warnings as errors, in a process of its own: a fork of one interpreter that has only other
people's packages in it, since torch takes seconds to import.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("radix", "tiers", "kernels", "engine")
#: Lines. DESIGN says about 450; this only stops the file that nobody splits.
LONGEST_FILE = 600
#: What a room may import beside the standard library and itself, anywhere in its code.
ALLOWED = {"radix": {"numpy"}, "tiers": {"numpy", "xxhash", "msgpack"}, "kernels": {"numpy", "torch", "triton"}}
#: What runs in the API process (engine/model and engine/core: these of their modules).
API_SIDE = ("engine.api", "engine.text", "engine.trace", "engine.cli", "engine.config", "engine.errors",
            "engine.core.client", "engine.core.frames", "engine.core.messages", "engine.model.config",
            "engine.model.gguf", "engine.model.library", "engine.model.download", "engine.model.sampling")
#: What takes seconds to import.
HEAVY = ("torch", "triton", "transformers", "safetensors")


def modules(*rooms: str) -> list[str]:
    found = []
    for room in rooms:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def api_side() -> list[str]:
    return [m for m in modules("engine") if any(m == a or m.startswith(a + ".") for a in API_SIDE)]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error", "-c", script, *arguments], cwd=ROOT, timeout=240,
                          capture_output=True, text=True)


def imports_of(path: Path) -> set[str]:
    """Dotted names of every absolute import in a file, those inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{a.name}" for a in node.names} | {node.module or ""}
    return names


def tops(names: set[str]) -> set[str]:
    return {n.partition(".")[0] for n in names}


#: argv: packages to have beforehand, modules. Prints {module: traceback} of those that failed.
IMPORT_EACH = """
import importlib, json, os, sys, traceback, warnings
packages, modules = json.loads(sys.argv[1]), json.loads(sys.argv[2])
for name in packages:
    importlib.import_module(name)
ours = [m for m in sys.modules if m.partition(".")[0] in ("radix", "tiers", "kernels", "engine")]
assert not ours, ours
failed = {}
for name in modules:
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")     # of a fork beside threads, from Python 3.12 on
        pid = os.fork()
    if pid == 0:
        said = ""
        try:
            importlib.import_module(name)
        except BaseException:
            said = traceback.format_exc()
        with os.fdopen(write, "w") as out:
            out.write(said)
        os._exit(0 if not said else 1)
    os.close(write)
    with os.fdopen(read) as source:
        said = source.read()
    if os.waitpid(pid, 0)[1] or said:
        failed[name] = said or "ended without a word"
print(json.dumps(failed))
"""


def failures(packages: list[str], names: list[str]) -> dict[str, str]:
    done = run(IMPORT_EACH, json.dumps(packages), json.dumps(names))
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_every_module_is_imported_alone_with_warnings_as_errors() -> None:
    names = modules(*ROOMS)
    assert len(names) > 60
    failed = failures(["torch", "numpy", "aiohttp.web", "pydantic", "jinja2.sandbox", "tokenizers", "rich.console",
                       "rich.progress", "gguf", "safetensors.torch", "msgpack", "huggingface_hub"], names)
    assert failed == {}


def test_the_api_process_never_imports_torch() -> None:
    """At run time, all of it in one process; what its functions import is the next test's."""
    names = api_side()
    assert {"engine.api.server", "engine.core.client", "engine.cli.main", "engine.text.template"} <= set(names)
    done = run("import importlib, sys\n"
               "for name in sys.argv[1:]: importlib.import_module(name)\n"
               f"print(sorted(set({HEAVY!r}) & set(sys.modules)))", *names)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "[]\n")


def test_no_function_of_the_api_process_imports_torch() -> None:
    names = api_side()
    with_torch = set(modules("engine/core", "engine/model")) - set(names) - {"engine.core", "engine.model"}
    assert "engine.core.build" in with_torch
    for name in names:
        path = ROOT / Path(*name.split("."))
        imported = imports_of(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
        assert tops(imported) & set(HEAVY) == set(), name
        assert imported & with_torch == set(), name


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_what_it_may(room: str) -> None:
    allowed = sys.stdlib_module_names | ALLOWED[room] | {room}
    for path in sorted((ROOT / room).rglob("*.py")):
        assert tops(imports_of(path)) - allowed == set(), path


@pytest.mark.parametrize(("room", "foreign"), [
    ("radix", ("torch", "engine", "tiers", "kernels", "msgpack", "xxhash")),
    ("tiers", ("torch", "engine", "radix", "kernels"))])
def test_a_room_without_torch_works_without_it(room: str, foreign: tuple[str, ...]) -> None:
    """As if nothing of it was installed: importing any of `foreign` raises."""
    done = run("import importlib, sys\n"
               "for name in sys.argv[2].split(','): sys.modules[name] = None\n"
               "for name in sys.argv[3:]: importlib.import_module(name)", room, ",".join(foreign), *modules(room))
    assert (done.returncode, done.stderr) == (0, "")


def test_no_file_is_over_long() -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines())
               for room in ROOMS for p in (ROOT / room).rglob("*.py")}
    assert {p: n for p, n in lengths.items() if n > LONGEST_FILE} == {}


#: Written so that this file does not name them itself.
FORBIDDEN = {
    "a folder of the machine that this was written on": re.compile(r"(?<![\w.])/work" + r"/"),
    "its library of tools": re.compile(r"(?<!\w)\." + r"library\b"),
    "a package index's host": re.compile(
        r"\b(pypi" + r"\.org|pythonhosted" + r"\.org|download\.pytorch" + r"\.org)\b|--(extra-)?index" + r"-url"),
}


def committed() -> list[Path]:
    """What git has or would have."""
    done = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                          capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs a git checkout: {done.stderr.strip()}")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_nothing_committed_names_this_machine_or_an_index() -> None:
    found = []
    for path in committed():
        data = path.read_bytes()
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            found += [f"{path.relative_to(ROOT)}:{number} names {what}" for what, pattern in FORBIDDEN.items()
                      if pattern.search(line)]
    assert found == []


def test_the_search_for_names_can_fail() -> None:
    for text in ("see /wo" + "rk/main", "from .lib" + "rary/env", "https://pypi" + ".org/simple"):
        assert any(p.search(text) for p in FORBIDDEN.values())
    assert not any(p.search("from engine.model.library import resolve  # net/work/x") for p in FORBIDDEN.values())
