"""Run the tests and print a line for each: no times and no paths, so the same on every machine."""

import importlib
import sys
from pathlib import Path

from tests.check import Failed

HERE = Path(__file__).resolve().parent


def place(trace) -> str:
    """Where it happened: the innermost line of this project that is not a helper's."""
    found = ""
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if path.is_relative_to(HERE) and path.name not in ("runtests.py", "check.py"):
            found = f"{path.relative_to(HERE).as_posix()}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def run(module: str, name: str, test) -> bool:
    try:
        test()
    except Failed as failed:
        print(f"FAIL  {module}.{name}: {failed} ({place(failed.__traceback__)})")
        return False
    except Exception as error:
        print(f"ERROR {module}.{name}: {type(error).__name__} ({place(error.__traceback__)})")
        return False
    print(f"ok    {module}.{name}")
    return True


def main() -> int:
    chosen = f"test_{sys.argv[1]}.py" if len(sys.argv) > 1 else "test_*.py"
    results = []
    for path in sorted((HERE / "tests").glob(chosen)):
        module = importlib.import_module(f"tests.{path.stem}")
        tests = [name for name in vars(module) if name.startswith("test_")]
        results += [run(path.stem.removeprefix("test_"), name, getattr(module, name)) for name in tests]
    print(f"{len(results)} tests, {results.count(False)} failed")
    return 1 if False in results or not results else 0


if __name__ == "__main__":
    sys.exit(main())
