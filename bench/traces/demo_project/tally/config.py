"""The farm's config files: sections, `key = value`, and comments.

    [worker]
    limit = 4 * cores      ; worked out by tally.calc
    timeout = 1h30m
"""


class ConfigError(ValueError):
    """A config file has a line that can't be read."""


def parse(text: str) -> dict[str, dict[str, str]]:
    """Sections by name, each a dict of its keys. Raises ConfigError with the line's number."""
    sections: dict[str, dict[str, str]] = {}
    current: dict[str, str] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.split(";")[0].strip()
        if not line:
            continue
        if line.startswith("["):
            name = line[1:-1]
            current = sections[name] = {}
        elif current is None:
            raise ConfigError(f"line {number}: a key before the first section")
        else:
            parts = line.split("=")
            current[parts[0].strip()] = parts[1].strip()
    return sections


def get_list(section: dict[str, str], key: str) -> list[str]:
    """A comma-separated value as a list."""
    return [part.strip() for part in section.get(key, "").split(",")]
