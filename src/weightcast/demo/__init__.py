"""The demo: GRPO on a small Qwen3, published after every step to live engines, all on one machine.

`weightcast demo` reads from `supervisor`, which starts the ranks of the `trainer` and the engines (`weightcast serve`)
as processes. The trainer reports `events`; `table` shows them, `report` collects them and writes the report.
"""
