"""The exit statuses of every command."""

from __future__ import annotations

OK = 0
NEGATIVE = 1
USAGE = 2
INTERRUPTED = 130

TABLE = """\
  0    it is done
  1    it is not: an engine did not take the version, a tensor differs, a peer can't be reached
  2    the call was wrong: unknown option, no such file, a value out of range
  130  interrupted by Ctrl-C"""
