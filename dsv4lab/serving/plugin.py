"""SGLang's plugin `dsv4lab` (entry-point group `sglang.srt.plugins`): puts our kernels where `DSV4LAB` says, or exits.

SGLang calls `register` once in every process, before it reads its arguments, and swallows any exception. So the plugin
ends the process instead: a server that was asked for our kernels never runs without them unnoticed. It imports what it
hooks first, compares it with the release's contract, and finds it in SGLang's registry afterwards; each hook then
leaves a receipt of its first call. With DSV4LAB unset it does nothing but tell, in a server that our launcher started,
of each kernel that Triton compiles.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

from dsv4lab import tuned
from dsv4lab.serving import contracts, receipts, releases, server_log, settings
from dsv4lab.serving.guard import one_line
from dsv4lab.serving.releases import Hook, Release
from dsv4lab.serving.settings import Setting

_TRUE, _FALSE = ("true", "1", "yes", "y"), ("false", "0", "no", "n")


def register() -> None:
    """The entry point. SystemExit with one line if what DSV4LAB asks for cannot be had."""
    try:
        setting = settings.parse(os.environ.get(settings.VARIABLE, ""))
        if receipts.VARIABLE in os.environ:
            tell_of_compilations()
        if setting.active:
            install(setting, version("sglang"))
    except Exception as error:
        kind = "" if isinstance(error, (ValueError, ImportError, AttributeError)) else f"{type(error).__name__}: "
        sys.exit(f"dsv4lab: {kind}{one_line(str(error))}")


def install(setting: Setting, installed: str) -> None:
    """Registers and applies the hooks that `setting` asks for on SGLang `installed`.

    ValueError or ImportError saying which hook cannot be had and why.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    release = releases.find(installed, setting.version)
    if setting.sm120_path != settings.STOCK:  # before the others are imported: they ask while they are
        HookRegistry.register(_full(release.sm120_path.targets[0]), lambda *_, **__: True, HookType.REPLACE)
        HookRegistry.apply_hooks()
    elif setting.attention != settings.STOCK and not _resolve(release.sm120_path.targets[0])():
        raise ValueError(
            f"attention={setting.attention} replaces SGLang's sm_120 attention, which this GPU does not take; "
            "sm120_path=forced makes it"
        )
    if setting.weights != settings.STOCK and release.weights is None:
        raise ValueError(f"weights={setting.weights}: sglang {installed} draws its weights after it has processed them")
    if setting.tables != settings.STOCK:
        _lead_to_tables()
    snapshot = contracts.read(setting.version or installed)
    hooked = [release.sm120_path.targets[0]] if setting.sm120_path != settings.STOCK else []
    for name, hook in _asked(setting, release):
        _select_path(name, getattr(setting, name), hook)
        for target in hook.targets:
            contracts.check(target, _resolve(target), snapshot)
    for target, function, around in _replacements(setting, release, installed):
        if target in (release.layer_forward, release.backend_init):
            contracts.check(target, _resolve(target), snapshot)
        HookRegistry.register(_full(target), function, HookType.AROUND if around else HookType.REPLACE)
        hooked.append(target)
    HookRegistry.apply_hooks()
    if lost := [target for target in hooked if _full(target) not in HookRegistry._patched]:
        raise ValueError(f"SGLang did not apply the hook on {', '.join(lost)}: its log says why")
    for name, impl in setting.active.items():
        receipts.write(_receipt("installed", name, impl, installed))


def tell_of_compilations() -> None:
    """From now on this process prints a line for each kernel that Triton compiles, instead of finding it on disk."""
    knobs = import_module("triton").knobs.compilation
    before = knobs.listener

    def listener(**event: Any) -> None:
        if before is not None:
            before(**event)
        if not event["cache_hit"]:
            milliseconds = event["times"].total / 1e3
            print(f"{server_log.COMPILED} {event['metadata']['name']} in {milliseconds:.0f} ms", flush=True)

    knobs.listener = listener


def _asked(setting: Setting, release: Release) -> Iterator[tuple[str, Hook]]:
    hooked = setting.active.keys() - {"sm120_path", "twice"}
    yield from ((name, getattr(release, name)) for name in setting.active if name in hooked)


def _replacements(setting: Setting, release: Release, installed: str) -> Iterator[tuple[str, Callable, bool]]:
    """(target, function, whether it goes around the original) of every hook, in the order to register them."""
    from dsv4lab.serving import adapters, linears

    partly_ours = {
        "gemm": linears.gemm, "gate": linears.gate, "slots": adapters.compression_metadata, "head": linears.head
    }  # fmt: skip
    if setting.active.keys() & {"attention", "indexer", "topk", "mhc", *partly_ours}:
        yield release.backend_init, adapters.warm_up(setting.active), True
    if setting.attention != settings.STOCK:
        rank = _resolve(release.rank_function) if release.rank_function else None
        yield release.layer_forward, adapters.note_layer, True

        def also(seen: dict[str, Any]) -> dict[str, Any]:
            own = adapters.own_heads(seen["q"].shape[2], rank)
            return {"q of this rank": seen["q"][:, :, own], "runs": adapters.variant(setting.attention, seen, own)}

        ours = adapters.attention(setting.attention, rank)
        ours = _proven("attention", setting.attention, installed, ours, also=also)
        if setting.twice != settings.STOCK:
            ours = _proven("twice", setting.twice, installed, adapters.twice(ours))
        yield release.attention.targets[0], ours, setting.twice != settings.STOCK
    if setting.sm120_path != settings.STOCK:  # that the sm_120 attention is called is the proof of the path
        stock = setting.attention == settings.STOCK
        call = lambda original, *a, **k: original(*a, **k)  # noqa: E731
        observed = _proven("sm120_path", setting.sm120_path, installed, call, compiled=stock)
        yield release.attention.targets[0], observed, True
    if setting.indexer != settings.STOCK:
        ours = adapters.indexer(setting.indexer)
        for target in release.indexer.targets:
            yield target, _proven("indexer", setting.indexer, installed, ours), False
    if setting.topk != settings.STOCK:
        for target in release.topk.targets:
            yield target, _proven("topk", setting.topk, installed, adapters.topk_transform), False
    if setting.mhc != settings.STOCK:
        ours = linears.mhc_pre(setting.mhc, functools.cache(lambda: _resolve(release.sinkhorn)))
        yield release.mhc.targets[0], _proven("mhc", setting.mhc, installed, ours), True
    if setting.weights != settings.STOCK:
        from dsv4lab.serving import weights

        yield release.weights.targets[0], _proven("weights", setting.weights, installed, weights.fill), False
    if setting.tables != settings.STOCK:
        device_name = lambda: import_module("torch").cuda.get_device_name()  # noqa: E731
        ours = linears.gemm_configs(tuned.required(), device_name)
        yield release.tables.targets[0], _proven("tables", setting.tables, installed, ours), True
    for name, maker in partly_ours.items():
        if impl := setting.active.get(name):
            proven = functools.partial(_proven, name, impl, installed)
            yield getattr(release, name).targets[0], maker(proven), True


def _lead_to_tables() -> None:
    """Points SGLang's MoE to the tuned tables, if there are some for it. ValueError if there are none at all."""
    root = tuned.required()
    if not tuned.sglang_tables(root):
        raise ValueError(f"tables=tuned finds none in {tuned.sglang_folder(root)}: dsv4lab tune fp8-gemm moe")
    if tuned.has_moe(root):
        wanted = str(tuned.sglang_folder(root))
        if (given := os.environ.setdefault(tuned.MOE_VARIABLE, wanted)) != wanted:
            raise ValueError(
                f"tables=tuned needs {tuned.MOE_VARIABLE}={wanted}, and the environment sets it to {given}"
            )


def _select_path(name: str, impl: str, hook: Hook) -> None:
    """Sets what makes SGLang take the path that is hooked; ValueError if the environment says the contrary."""
    for variable, wanted in hook.environment.items():
        given = os.environ.get(variable, wanted).lower()
        if given not in (_TRUE if wanted == "1" else _FALSE):
            raise ValueError(f"{name}={impl} needs {variable}={wanted}, and the environment sets it to {given}")
        os.environ[variable] = wanted


def _proven(
    hook: str, impl: str, installed: str, function: Callable, compiled: bool = False,
    also: Callable[[dict[str, Any]], dict[str, Any]] = lambda seen: {},
) -> Callable:  # fmt: skip
    """`function`, which leaves a receipt when its first call has returned, with its arguments and what is `also` seen.

    torch.compile leaves it alone, unless `compiled`: what it calls may then be compiled.
    """
    done = False

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        result = function(*args, **kwargs)
        if not done:
            done = True
            seen = {str(place): value for place, value in enumerate(args)} | kwargs
            receipts.write(_receipt("live", hook, impl, installed, seen | also(seen)))
        return result

    return import_module("torch").compiler.disable(called, recursive=not compiled)


def _receipt(kind: str, hook: str, impl: str, installed: str, seen: dict[str, Any] | None = None) -> receipts.Receipt:
    """Of this process, with the dtypes and shapes of the tensors it saw, and what is said in words."""
    torch = import_module("torch")
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    described = {
        name: value if isinstance(value, str) else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        for name, value in (seen or {}).items()
        if isinstance(value, (str, torch.Tensor))
    }
    rank = torch.distributed.get_rank() if distributed else 0
    return receipts.Receipt(
        kind=kind, hook=hook, impl=impl, rank=rank, pid=os.getpid(), sglang=installed, arguments=described
    )


def _full(target: str) -> str:
    return f"sglang.{target}"


def _resolve(target: str) -> Any:
    """What SGLang has under `target` now, its module imported. ImportError or AttributeError naming what is missing."""
    names = _full(target).split(".")
    depth = next(i for i, name in enumerate(names) if name[:1].isupper() or i == len(names) - 1)
    found = import_module(".".join(names[:depth]))
    for name in names[depth:]:
        found = getattr(found, name)
    return found
