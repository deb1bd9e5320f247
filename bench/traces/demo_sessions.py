# ruff: noqa: E501  (prose, as long as its sentences)
"""What the scripted agent is asked, says and does. What its tools answer is not here: they are run.

A session is a list of steps. `fork` begins with another session's steps, so both share a path until it differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SYSTEM = """\
You are Tally-Hand, a careful coding agent. You work on one small Python project at a time, in a checkout of your own, \
until what was asked is done and the tests that belong to it pass.

# How you work

1. Look before you change anything. Find the code with `list` and `search`, then `read` all of the function that you \
are about to change, and the tests that guard it.
2. Run the tests before your first change, so that you know what failed already.
3. Make the smallest change that puts the cause right. Do not work around a fault at the place where it shows, if it \
was made somewhere else. Do not change a test so that it passes.
4. After each change, run the tests of that file again and read what they print. A change that makes another test \
fail is not finished.
5. Call one tool at a time. Say in one or two sentences what you expect from it, and why; then call it.
6. When you are done, stop calling tools. Say what was wrong, what you changed and in which files, what the tests say \
now, and what you saw on the way that you did not change.

# House rules of the code

- Standard library only, Python 3.11 or later. Public functions have types and a docstring of one sentence.
- Errors are exceptions of the module's own class (`CalcError`, `ConfigError`), or `ValueError` where it has none. \
The message names the value that was wrong, and the line, if there is one.
- Functions stay short. A comment says why, never what.
- Names are whole words. No abbreviations, except for the units of durations: s, m, h, d.
- Behaviour that nobody asked for is not added.

# Tools

Each tool takes a JSON object. A result that begins with `error:` means that nothing was done.

## list
Lists files and the number of their lines, sorted by path.
- `path` (string, optional): a folder or a file inside the project. The default is the whole project.
Example: {"path": "tests"}

## read
Prints a file with line numbers, at most 120 lines at once.
- `path` (string): the file.
- `first` (integer, optional): the first line to print; the default is 1.
- `last` (integer, optional): the last line to print; the default is the end of the file.
Example: {"path": "tally/calc.py", "first": 50, "last": 80}

## search
Prints each line that matches, as `path:line: text`.
- `pattern` (string): a regular expression of Python's `re`.
- `path` (string, optional): where to search. The default is the whole project.
Example: {"pattern": "class .*Error", "path": "tally"}

## edit
Replaces text in a file and prints the difference. The old text must be in the file exactly once, with its \
indentation; take enough lines to make it unique.
- `path` (string): the file.
- `old` (string): the text that is there.
- `new` (string): the text that is to be there.
Example: {"path": "tally/calc.py", "old": "return value", "new": "return float(value)"}

## test
Runs the tests and prints a line for each: `ok`, `FAIL` with what was got and wanted, or `ERROR` with the exception; \
then the number of tests and the exit code, which is 0 if all passed.
- `file` (string, optional): only the tests of this module, such as "calc". The default is all of them.
Example: {"file": "calc"}

# The project

`tally` is a set of small helpers for a build farm: `durations` reads and shows times such as "1h30m"; `calc` works \
out limits such as "4 * cores"; `taskqueue` decides which task is next; `config` reads the farm's config files. Each \
module `tally/X.py` has its tests in `tests/test_X.py`. Several people depend on it, none of whom is here to be \
asked: where a docstring and a test say what is wanted, that is what is wanted.
"""


@dataclass(frozen=True)
class User:
    text: str


@dataclass(frozen=True)
class Do:
    """The agent says `text`, and calls a tool unless `tool` is None."""

    text: str
    tool: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


Step = User | Do


def fork(steps: list[Step], turns: int, *others: Step) -> list[Step]:
    """The first `turns` turns of another session, then other steps."""
    kept: list[Step] = []
    for step in steps:
        if isinstance(step, Do):
            turns -= 1
        kept.append(step)
        if turns == 0:
            break
    return [*kept, *others]


POWERS: list[Step] = [
    User("The limit `2 ^ 3 ^ 2` in our worker's config comes out as 64. By the docs of every other calculator it is "
         "512. Please find out why, and put it right."),
    Do("The calculator is one short file. I read all of it, because the grammar at its head and the parser have to "
       "agree.", "read", {"path": "tally/calc.py"}),
    Do("`power` takes its operands in a loop, from the left, so `2 ^ 3 ^ 2` is worked out as (2 ^ 3) ^ 2. Before I "
       "change it, I want to know what fails already.", "test", {"file": "calc"}),
    Do("Four tests fail, and two of them are about powers. A power has to take everything to its right as its "
       "exponent: one `if` and a call of itself in place of the loop.", "edit", {
           "path": "tally/calc.py",
           "old": '        while self.peek() == "^":\n            self.take()\n            value = value ** self.unary()',
           "new": '        if self.peek() == "^":\n            self.take()\n            value = value ** self.power()'}),
    Do("Now `2 ^ 3 ^ 2` should be 512. I expect the test about the minus to fail still.", "test", {"file": "calc"}),
    Do("As expected. `-2 ^ 2` is still 4, because the minus is taken before the power. The minus has to stand above "
       "the power in the grammar: `term` asks for `unary`, `unary` for `power`, and `power` for an atom.", "edit", {
           "path": "tally/calc.py",
           "old": '        value = self.unary()\n        if self.peek() == "^":\n            self.take()\n'
                  '            value = value ** self.power()\n        return value\n\n'
                  '    def unary(self) -> float:\n        if self.peek() == "-":\n            self.take()\n'
                  '            return -self.unary()\n        return self.atom()\n',
           "new": '        value = self.atom()\n        if self.peek() == "^":\n            self.take()\n'
                  '            value = value ** self.unary()\n        return value\n\n'
                  '    def unary(self) -> float:\n        if self.peek() == "-":\n            self.take()\n'
                  '            return -self.unary()\n        return self.power()\n'}),
    Do("`term` must ask for `unary` now, or a minus behind `*` is no longer read.", "edit", {
        "path": "tally/calc.py",
        "old": '        value = self.power()\n        while self.peek() in ("*", "/"):\n'
               '            value = value * self.power() if self.take() == "*" else value / self.power()\n',
        "new": '        value = self.unary()\n        while self.peek() in ("*", "/"):\n'
               '            value = value * self.unary() if self.take() == "*" else value / self.unary()\n'}),
    Do("Both changes are in. Let me see all of the calculator's tests.", "test", {"file": "calc"}),
    Do("Powers now group to the right and bind tighter than a minus: `2 ^ 3 ^ 2` is 512 and `-2 ^ 2` is -4. The cause "
       "was the loop in `Parser.power`, which worked from the left. I changed `power`, `unary` and `term` in "
       "tally/calc.py. Two tests fail as they did before, and have nothing to do with powers: a wrong closing bracket "
       "is accepted, and a division by zero raises Python's own error. The grammar in the docstring is out of date "
       "by these two rules; I left it for you to see."),
]

POWERS_ANOTHER_WAY: list[Step] = fork(
    POWERS, 2,
    Do("Four tests fail. The user asked for the powers only, and the rest of the grammar should stay as it is; so I "
       "collect the operands of a chain first, and then work it out from its right end.", "edit", {
           "path": "tally/calc.py",
           "old": '        value = self.unary()\n        while self.peek() == "^":\n            self.take()\n'
                  '            value = value ** self.unary()\n        return value\n',
           "new": '        chain = [self.unary()]\n        while self.peek() == "^":\n            self.take()\n'
                  '            chain.append(self.unary())\n        value = chain.pop()\n        while chain:\n'
                  '            value = chain.pop() ** value\n        return value\n'}),
    Do("The test about grouping should pass now.", "test", {"file": "calc"}),
    Do("It does. The division by zero in the same file is a matter of two lines, and the house rules ask for the "
       "module's own error, so I look at its place once more.", "search",
       {"pattern": "CalcError|/ self", "path": "tally/calc.py"}),
    Do("512 comes out now: `Parser.power` collects the chain and works it out from the right. I changed that one "
       "function in tally/calc.py. Three tests still fail as before: the minus before a power, the wrong closing "
       "bracket, and the division by zero. I did not touch them, because they change what existing configs mean; "
       "tell me if you want them as well."),
)

QUEUE_ORDER: list[Step] = [
    User("Builds of equal priority start in alphabetical order. They should start in the order in which they were "
         "added. People have begun to call their tasks aaa-build. Please fix the queue."),
    Do("I look for everything that puts something into the queue's heap.", "search",
       {"pattern": "heap", "path": "tally"}),
    Do("All of it is in one module. I read it as a whole.", "read", {"path": "tally/taskqueue.py"}),
    Do("The heap's entries are (priority, name), so equals are ordered by their names. I read what the tests expect, "
       "of ties and of retries.", "read", {"path": "tests/test_taskqueue.py"}),
    Do("Now what fails today.", "test", {"file": "taskqueue"}),
    Do("Three fail, and the tie is one of them. A number that counts what was added goes between priority and name; "
       "first, the queue has to count.", "edit", {
           "path": "tally/taskqueue.py",
           "old": "        self.heap: list[tuple[int, str]] = []\n",
           "new": "        self.heap: list[tuple[int, int, str]] = []\n        self.added = 0\n"}),
    Do("Entries are made in `add` and in `fail`. One helper for both, so that they can't differ.", "edit", {
        "path": "tally/taskqueue.py",
        "old": "        heapq.heappush(self.heap, (priority, name))\n        return task\n",
        "new": "        self.push(task)\n        return task\n\n    def push(self, task: Task) -> None:\n"
               '        """Queue `task` behind its equals."""\n        self.added += 1\n'
               "        heapq.heappush(self.heap, (task.priority, self.added, task.name))\n"}),
    Do("`fail` uses the helper, and `take` finds the name in the entry's third place.", "edit", {
        "path": "tally/taskqueue.py",
        "old": "            heapq.heappush(self.heap, (task.priority, name))\n",
        "new": "            self.push(task)\n"}),
    Do("And `take`.", "edit", {
        "path": "tally/taskqueue.py", "old": "self.tasks[entry[1]]", "new": "self.tasks[entry[2]]"}),
    Do("The order of ties should be right now.", "test", {"file": "taskqueue"}),
    Do("Tasks of equal priority now start in the order in which they were added. The heap held (priority, name), so "
       "the name decided; there is a counter between the two now, and `push` is the one place that makes entries. All "
       "of it is in tally/taskqueue.py. Two tests fail as before: a flaky task gets one try too few, and a name can "
       "be queued twice. Both are worth looking at soon."),
]

RETRIES: list[Step] = fork(
    QUEUE_ORDER, 4,
    Do("Three fail: the tie, the number of retries, and names that are queued twice. The retries are the ones that "
       "lose people's builds, so I begin with them. `tries` counts the first try as well, so the limit is one more "
       "than `retries`.", "edit", {
           "path": "tally/taskqueue.py", "old": "        if task.tries < task.retries:\n",
           "new": "        if task.tries <= task.retries:\n"}),
    Do("A name that is already known must be refused, or the first task of that name is lost without a word.", "edit", {
        "path": "tally/taskqueue.py",
        "old": "        task = Task(name, priority, set(needs), retries)\n",
        "new": "        if name in self.tasks:\n"
               '            raise ValueError(f"there is a task {name!r} already")\n'
               "        task = Task(name, priority, set(needs), retries)\n"}),
    Do("Both of these should pass now, and the tie should be all that is left.", "test", {"file": "taskqueue"}),
    Do("A task is tried once and then as often again as `retries` says, and a name that is queued already is refused. "
       "Both changes are in tally/taskqueue.py. The order of equals is still by name. For that, the heap's entries "
       "need a number that counts what was added; I would do that next, as a change of its own."),
)

DURATIONS: list[Step] = [
    User("The farm's page shows `1h0m0s` where it should say `1h`, and nobody can write `2d` in a config. Please see "
         "to both."),
    Do("Both belong to the durations. I read the module.", "read", {"path": "tally/durations.py"}),
    Do("`show` writes every unit, also of nothing, and `UNITS` ends at hours. The tests say what is wanted for zero.",
       "read", {"path": "tests/test_durations.py"}),
    Do("I run them before I change anything.", "test", {"file": "durations"}),
    Do("First the days: one more unit, in the table and in the pattern.", "edit", {
        "path": "tally/durations.py",
        "old": 'UNITS = {"s": 1, "m": 60, "h": 3600}\nPART = re.compile(r"(\\d+)([smh])")',
        "new": 'UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}\nPART = re.compile(r"(\\d+)([smhd])")'}),
    Do("Then `show`: a part of nothing is left out, and nothing at all is 0s. Days stay out of it, since the docstring "
       "promises hours.", "edit", {
           "path": "tally/durations.py",
           "old": '        parts.append(f"{count}{unit}")\n    return "".join(parts)\n',
           "new": '        if count:\n            parts.append(f"{count}{unit}")\n'
                  '    return "".join(parts) or "0s"\n'}),
    Do("The two tests of `show` and the one of days should pass.", "test", {"file": "durations"}),
    Do("`2d` is read as 172800 seconds, and `show` leaves out what is nothing: 3600 is `1h`, 0 is `0s`. Both changes "
       "are in tally/durations.py. Two tests fail as before: words and numbers without a unit are taken for 0 "
       "seconds and not refused. That is a different fault, in `parse`, and worth an issue: a timeout that is "
       "misspelt is no timeout at all."),
]

STRICT_DURATIONS: list[Step] = [
    User("A colleague wrote `timeout = 10` and the job was killed at once. Run all the tests, and fix whatever lets a "
         "wrong duration through."),
    Do("All tests first, as you ask.", "test"),
    Do("Many fail, in all four modules. `parse('10')` gives 0, which is what killed the job. I read `parse`.", "read",
       {"path": "tally/durations.py", "first": 1, "last": 15}),
    Do("`findall` takes the parts that fit and passes over the rest. Who depends on that?", "search",
       {"pattern": "durations|parse\\("}),
    Do("Only the tests call it. The whole text has to be parts and spaces, at least one; so I match the whole, and "
       "only then add up.", "edit", {
           "path": "tally/durations.py",
           "old": '    total = 0\n    for number, unit in PART.findall(text):\n',
           "new": '    if not WHOLE.fullmatch(text):\n'
                  '        raise ValueError(f"{text!r} is no duration; write it as 90s or 1h30m")\n'
                  '    total = 0\n    for number, unit in PART.findall(text):\n'}),
    Do("The pattern for the whole belongs beside the one for a part.", "edit", {
        "path": "tally/durations.py",
        "old": 'PART = re.compile(r"(\\d+)([smh])")\n',
        "new": 'PART = re.compile(r"(\\d+)([smh])")\nWHOLE = re.compile(r"\\s*(\\d+[smh]\\s*)+")\n'}),
    Do("Words, bare numbers and the empty text should be refused now.", "test", {"file": "durations"}),
    Do("A duration that can't be read is refused now, and the message names it and shows how to write one; spaces "
       "between the parts are still fine. The change is in `parse` in tally/durations.py. Days and the way `show` "
       "writes hours still fail; they were not asked for. The other modules' failures are as they were."),
]

CONFIG: list[Step] = [
    User("`flags = -DMODE=fast` in build.ini reaches the compiler as `-DMODE`. And a line without a value ends the whole "
         "farm with an IndexError. Please repair the config reader."),
    Do("I search for where a line is taken apart.", "search", {"pattern": "split\\(", "path": "tally"}),
    Do("`line.split(\"=\")` cuts at every equals sign. I read the whole reader.", "read", {"path": "tally/config.py"}),
    Do("And what is asked of it.", "test", {"file": "config"}),
    Do("Four of five fail. One `partition` at the first equals sign cures two of them: the value keeps its other "
       "signs, and a line without one can be told, and named.", "edit", {
           "path": "tally/config.py",
           "old": '            parts = line.split("=")\n            current[parts[0].strip()] = parts[1].strip()\n',
           "new": '            key, sign, value = line.partition("=")\n            if not sign:\n'
                  '                raise ConfigError(f"line {number}: no value for {key.strip()!r}")\n'
                  '            current[key.strip()] = value.strip()\n'}),
    Do("A section that comes twice begins again from nothing. `setdefault` keeps what was there.", "edit", {
        "path": "tally/config.py",
        "old": "            current = sections[name] = {}\n",
        "new": "            current = sections.setdefault(name, {})\n"}),
    Do("Three of the four should be gone.", "test", {"file": "config"}),
    Do("The flags arrive whole, and a line without a value is named with its number. I also let a section that comes "
       "twice keep its first keys, because the same function lost them. All of it is in `parse` in tally/config.py. "
       "One test still fails: an empty list is read as a list with one empty text, in `get_list`. I left it, since "
       "callers may count on it."),
]

REVIEW: list[Step] = [
    User("I take over this project on Monday. Change nothing; tell me in what state it is, and where I should begin."),
    Do("I begin with what the project says of itself.", "read", {"path": "README.md"}),
    Do("Now its size.", "list"),
    Do("And its state.", "test"),
    Do("Most of it fails. I want to see how the modules report errors, since several failures are errors that are not "
       "raised.", "search", {"pattern": "raise |class .*Error"}),
    Do("The config reader has failures of three kinds in one function; I read that.", "read",
       {"path": "tally/config.py"}),
    Do("The project is small, four modules and a test file for each, and has no dependencies. The tests are good: each "
       "failure names one cause. Begin with tally/config.py, where one `partition` in place of `split` cures two "
       "faults that users meet; then `durations.parse`, which takes anything for 0 seconds; then the queue's order "
       "and retries. The calculator needs a decision from you first, because right grouping of powers changes the "
       "meaning of existing configs. I changed nothing."),
]

SESSIONS: dict[str, list[Step]] = {
    "powers": POWERS,
    "queue-order": QUEUE_ORDER,
    "durations": DURATIONS,
    "config": CONFIG,
    "powers-another-way": POWERS_ANOTHER_WAY,
    "retries": RETRIES,
    "strict-durations": STRICT_DURATIONS,
    "review": REVIEW,
}
