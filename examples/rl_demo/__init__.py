"""The demo: GRPO on a small Qwen3, published after every step to live engines, all on one machine.

`scripts/demo` reads from `supervisor`, which starts the ranks of the `trainer` and the engines (`weightcast serve`)
as processes. `messages` are what supervisor and trainer send each other; `table` shows the events among them, `report`
collects them.
"""
