"""Run by test_ray_cluster.py in a process of its own: a Ray cluster of two, later three nodes, and the example on it.

The argument is a directory for the checkpoint. The last line of stdout is what happened, as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from weightcast.control.client import HttpEngine

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import ray_cluster

# The workers can't import the example, which is in none of their paths.
ray.cloudpickle.register_pickle_by_value(ray_cluster)

CPUS_PER_NODE = 2
OBJECT_STORE_BYTES = 80 << 20
DEADLINE_SECONDS = 45.0


@dataclasses.dataclass
class Story:
    """What happened: reports of all steps, and where everything was. `served`: what each engine holds at the end.

    `caught_up`: what the lost engine served after `catch_up` and before the next step. `reports_out`: of steps while
    there was no node for a third engine, then one; `reports_in`: after only the first was to stay.
    """

    reports: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    trainer_nodes: list[str] = dataclasses.field(default_factory=list)
    places_before: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    places_after: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    caught_up: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    reports_out: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    reports_in: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    served: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def two_nodes() -> Iterator[Callable[[], None]]:
    """Gives a function that adds a third node."""
    node = {"num_cpus": CPUS_PER_NODE, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster()
    try:
        cluster.add_node(**node, node_ip_address="127.0.0.1")
        cluster.add_node(**node, node_ip_address="127.0.0.1")
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
        yield lambda: cluster.add_node(**node, node_ip_address="127.0.0.1")
    finally:
        ray.shutdown()
        cluster.shutdown()


def play(checkpoint: Path, add_node: Callable[[], None]) -> Story:
    """Two steps; an engine is killed, and catches up between steps; engines are added and removed while it trains."""
    story, job = Story(), ray_cluster.Job(num_trainers=2, num_engines=2)
    story.trainer_nodes = [place["node"] for place in ray.get([t.place.remote() for t in job.trainers])]
    story.reports += [job.step(), job.step()]
    story.places_before = list(job.places)
    os.kill(job.places[0]["pid"], signal.SIGKILL)
    story.reports.append(job.step())
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not any(job.catch_up().values()):
        assert time.monotonic() < deadline, story
    story.caught_up = [look(place["url"], job.token) for place in job.places]
    story.reports.append(job.step())
    story.places_after = list(job.places)

    job.scale_engines(3)
    story.reports_out += [job.step(), job.step()]
    with ThreadPoolExecutor(1) as pool:

        def until_there_are_three() -> None:
            deadline = time.monotonic() + DEADLINE_SECONDS
            while len(story.reports_out[-1]["engines"]) < 3 or not all(story.reports_out[-1]["engines"].values()):
                assert time.monotonic() < deadline, story
                story.reports_out.append(job.step())

        stepping = pool.submit(until_there_are_three)
        add_node()
        stepping.result()
        stepping = pool.submit(lambda: story.reports_in.append(job.step()))
        job.scale_engines(1)
        stepping.result()
    story.reports_in += [job.step(), job.step()]
    job.save(checkpoint)
    story.served = [look(place["url"], job.token) for place in job.places]
    job.close()
    return story


def look(url: str, token: str) -> dict[str, Any]:
    with contextlib.closing(HttpEngine(url, token=token)) as engine:
        info = engine.info()
        return {"url": url, "run": info.run, "version": info.weight_version, "digests": engine.digests()}


if __name__ == "__main__":
    with two_nodes() as more:
        played = play(Path(sys.argv[1]), more)
    print(json.dumps(dataclasses.asdict(played)))
