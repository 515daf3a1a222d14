"""The demo: GRPO on a small Qwen3, published after every step to live engines, all on one machine.

`run` is the command. `supervisor` starts the ranks of the `trainer` and the engines (`weightcast serve`), as processes
of their own. On each trainer rank: `ranks`, `policy`, `warmup`, `grpo`, `masters`, put together by `learner`. On rank 0
besides: `task` and `rollouts`, led by `training`, judged by `oracle`. `events` come back; `table` shows them, `result`
collects them, `report` writes them down.
"""
