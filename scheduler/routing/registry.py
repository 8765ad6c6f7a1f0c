"""Routing policies by the name that the configuration gives them."""

from __future__ import annotations

from scheduler.plan import SchedulerSettings
from scheduler.routing.policies.least_loaded import LeastLoaded
from scheduler.routing.policies.local_cache_aware import LocalCacheAware
from scheduler.routing.policies.mooncake import Mooncake
from scheduler.routing.policies.ours import Ours
from scheduler.routing.policies.random import Random
from scheduler.routing.policies.round_robin import RoundRobin
from scheduler.routing.policy import Policy


def make_policy(settings: SchedulerSettings) -> Policy:
    """A new policy as ``settings.policy`` names it."""
    colocated = settings.colocated
    match settings.policy:
        case "random":
            return Random(seed=settings.seed, colocated=colocated)
        case "round_robin":
            return RoundRobin(colocated=colocated)
        case "least_loaded":
            return LeastLoaded(colocated=colocated)
        case "local_cache_aware":
            return LocalCacheAware(colocated=colocated)
        case "mooncake":
            return Mooncake(threshold=settings.balancing_threshold, colocated=colocated)
        case "ours":
            return Ours(colocated=colocated)
