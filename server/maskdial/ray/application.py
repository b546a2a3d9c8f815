"""The Ray Serve application: how replicas are placed, scaled, watched and drained."""

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve._private.constants import (
    RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S,
    RAY_SERVE_ENABLE_HA_PROXY,
)

from maskdial.config import Config, load_config
from maskdial.ray.replica import Replica

DEPLOYMENT = "maskdial"
"""The deployment's name, by which a Serve configuration may override its options."""

# A replica takes at least what the slots and queues of so many models hold, so that its own
# refusals, which have a reason, are met before Ray's.
_MODELS = 4
_SLOTS_CPU, _SLOTS_GPU = 8, 32
_STOP_MARGIN_SECONDS = 10.0


def app(settings: dict[str, Any]) -> Application:
    """Builds the application; a Serve configuration names it as ``maskdial.ray:app``.

    Args:
        settings: the server's, as in its TOML file; a Serve configuration has them as ``args``.

    Raises:
        ConfigError: a setting is unknown or out of range.
    """
    config = load_config(settings)
    deployment = serve.deployment(serve.ingress()(Replica))
    return deployment.options(name=DEPLOYMENT, **deployment_options(config)).bind(
        {**settings, "threads": num_threads(config)}
    )


def deployment_options(config: Config) -> dict[str, Any]:
    """The options of the deployment that follow from the settings, as a Serve configuration has
    them.
    """
    gpus = {"num_gpus": 1} if may_use_gpu(config) else {}
    max_open = _MODELS * (_num_slots(config) + config.max_queue)
    return {
        "ray_actor_options": {"num_cpus": num_threads(config), **gpus},
        "max_ongoing_requests": max_open,
        # Simultaneous requests wait in Ray's proxy for a moment, even if replicas are free.
        "max_queued_requests": max_open,
        "backpressure_config": {"status_code": 429, "retry_after_s": 1.0},
        **_routing(),
        "health_check_period_s": 5.0,
        "health_check_timeout_s": 30.0,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": _reachable() + config.grace_period + _STOP_MARGIN_SECONDS,
    }


def _reachable() -> float:
    """Seconds for which a replica that is to go still takes requests: those of a HAProxy that has
    not heard of it.
    """
    if not RAY_SERVE_ENABLE_HA_PROXY:
        return 0.0
    return float(RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S)


def _routing() -> dict[str, Any]:
    """How requests find a replica, but where Ray's HAProxy does that and takes no router."""
    if RAY_SERVE_ENABLE_HA_PROXY:
        return {}
    return {"request_router_config": {"request_router_class": "maskdial.ray.router.SessionRouter"}}


def autoscaling(
    config: Config, min_replicas: int, max_replicas: int, target: float | None
) -> dict[str, Any]:
    """Between how many replicas to scale, by the requests that they are busy with.

    ``target`` is the number for which one replica is right. None: its slots, all of which share a
    decode step. Ray's default of 2 would leave most of them empty.
    """
    return {
        "min_replicas": min_replicas,
        "max_replicas": max_replicas,
        "target_ongoing_requests": _num_slots(config) if target is None else target,
        "upscale_delay_s": 10.0,
        "downscale_delay_s": 300.0,
    }


def num_threads(config: Config) -> int:
    """Intra-op threads of a replica, for which Ray reserves as many processors; ``auto`` is 1."""
    return config.threads or 1


def _num_slots(config: Config) -> int:
    """Slots of a causal model; those of ``auto`` where memory does not make them fewer."""
    return config.slots or (_SLOTS_GPU if may_use_gpu(config) else _SLOTS_CPU)


def may_use_gpu(config: Config) -> bool:
    """Whether CUDA is the provider, or one of several to try."""
    return "cuda" in config.provider.split(",")
