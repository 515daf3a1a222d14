"""The demo: GRPO on a small Qwen3, published after every step to live engines, all on one machine.

`run` is the command. `supervisor` starts `trainer` and the engines (`weightcast serve`), as processes of their own.
In the trainer: `task`, `policy`, `warmup`, `grpo`, `masters`, `rollouts`, put together by `training`, judged by
`oracle`. `events` come back; `table` shows them, `result` collects them, `report` writes them down.
"""
