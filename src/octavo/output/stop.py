"""Finds stop strings in a text that comes in pieces.

Rule: what is found depends on the text alone, not on how it was cut. Characters are read one by one. The
stop that is complete first ends the text; of several that are complete at the same character, the one that
began first, which is the longest. So nothing after that character matters, and none of it need be computed.

A text is held back only as far as it may be the beginning of a stop: the longest suffix that is a proper
prefix of one. Each stop is a Knuth-Morris-Pratt automaton, so a character costs a few operations for each
stop, however long the stops are.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """The text of one request, up to its first stop string. After a stop it takes no more text.

    include_stop: the text ends behind the stop instead of before it.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stopped

    def push(self, text: str, *, armed: bool = True) -> str:
        """Take the next piece of text and return what is known to come before any stop.

        After a stop was found, `stopped` is set, and what comes behind the stop is gone. A stop that is
        complete in a piece that is not armed is passed over.
        """
        if self._stopped:
            return ""
        if not self._automata:
            return text
        text = self._held + text
        for end in range(len(self._held) + 1, len(text) + 1):
            complete = [a.size for a in self._automata if a.advance(text[end - 1])]
            if complete and armed:
                self._stopped, self._held = True, ""
                return text[:end] if self._include_stop else text[: end - max(complete)]
        held = max(automaton.matched for automaton in self._automata)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return what was held back: it was no stop after all."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Knuth, Morris, Pratt, "Fast pattern matching in strings". matched: how many characters of the stop
    the text ends with, the most that are possible."""

    def __init__(self, stop: str) -> None:
        self.size = len(stop)
        self.matched = 0
        self._stop = stop
        #: [i]: where to go on when character i does not fit.
        self._fallback = [0, 0]
        for character in stop[1:]:
            self._fallback.append(self._next(self._fallback[-1], character))

    def advance(self, character: str) -> bool:
        """Read a character; True where it completes the stop."""
        self.matched = self._next(self.matched, character)
        complete = self.matched == self.size
        if complete:  # and passed over: it may still overlap with the next
            self.matched = self._fallback[self.size]
        return complete

    def _next(self, matched: int, character: str) -> int:
        while matched and self._stop[matched] != character:
            matched = self._fallback[matched]
        return matched + (self._stop[matched] == character)
