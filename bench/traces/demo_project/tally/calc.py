"""A calculator for limits in config files: + - * / ^, brackets and names.

    expression = term (("+" | "-") term)*
    term       = power (("*" | "/") power)*
    power      = unary ("^" unary)*
    unary      = "-" unary | atom
    atom       = number | name | "(" expression ")"
"""

import re

TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?)|([a-z_]+)|(.))")


class CalcError(ValueError):
    """The expression can't be worked out."""


def tokens(text: str) -> list[str]:
    found = []
    for number, name, other in TOKEN.findall(text):
        found.append(number or name or other)
    return found


def evaluate(text: str, names: dict[str, float] | None = None) -> float:
    """The value of `text`, with `names` for what is not a number."""
    parser = Parser(tokens(text), names or {})
    value = parser.expression()
    if parser.peek() is not None:
        raise CalcError(f"unexpected {parser.peek()!r}")
    return value


class Parser:
    def __init__(self, found: list[str], names: dict[str, float]) -> None:
        self.found = found
        self.names = names
        self.at = 0

    def peek(self) -> str | None:
        return self.found[self.at] if self.at < len(self.found) else None

    def take(self) -> str:
        token = self.peek()
        if token is None:
            raise CalcError("the expression ends too early")
        self.at += 1
        return token

    def expression(self) -> float:
        value = self.term()
        while self.peek() in ("+", "-"):
            value = value + self.term() if self.take() == "+" else value - self.term()
        return value

    def term(self) -> float:
        value = self.power()
        while self.peek() in ("*", "/"):
            value = value * self.power() if self.take() == "*" else value / self.power()
        return value

    def power(self) -> float:
        value = self.unary()
        while self.peek() == "^":
            self.take()
            value = value ** self.unary()
        return value

    def unary(self) -> float:
        if self.peek() == "-":
            self.take()
            return -self.unary()
        return self.atom()

    def atom(self) -> float:
        token = self.take()
        if token == "(":
            value = self.expression()
            self.take()
            return value
        if token[0].isdigit():
            return float(token)
        if token in self.names:
            return self.names[token]
        raise CalcError(f"unknown name {token!r}")
