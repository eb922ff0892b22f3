"""The `jaxinfer` command: flags and TOML become configurations, then one subcommand runs.

Imports no jax: `--help` and flag errors are immediate, and `--num-threads` must come before it.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxinfer import cpu
from jaxinfer._kernels_package import check_kernels_package
from jaxinfer.collection import paused_collection
from jaxinfer.config import (
    XLA_FRACTION,
    ConfigError,
    EngineConfig,
    ServerConfig,
    Setting,
    override,
    settings_of,
)
from jaxinfer.config_file import ModelEntry, load_models, load_toml
from jaxinfer.log_format import formatter
from jaxinfer.machine import version_of

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
_DISTRIBUTIONS = ("jaxinfer", "jax", "jaxlib", "flax", "numpy", "aiohttp", "tokenizers")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0, 1 failed, 2 wrong flags or port taken."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        check_kernels_package()
    except ImportError as error:
        print(f"jaxinfer: {error}", file=sys.stderr)
        return EXIT_FAILURE
    args = _parser(words[:2]).parse_args(words)
    try:
        return args.run(args)
    except ConfigError as error:
        print(f"jaxinfer {args.command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (ValueError, OSError) as error:
        # A model that cannot be used; where the message is not enough, debug has the traceback.
        logging.getLogger("jaxinfer").debug("failed", exc_info=error)
        print(f"jaxinfer {args.command}: {error}", file=sys.stderr)
        return EXIT_FAILURE


def serve_main() -> int:
    """Runs `jaxinfer serve` with the process's arguments: `serve.py` and `jaxinfer-server`."""
    return main(["serve", *sys.argv[1:]])


def add_settings(
    parser: argparse.ArgumentParser, config: type[EngineConfig] | type[ServerConfig]
) -> None:
    """Adds one flag per field of a configuration; a flag that is not given leaves no attribute."""
    group = parser.add_argument_group("engine" if config is EngineConfig else "server")
    for setting in settings_of(config):
        names = ["--" + setting.name.replace("_", "-"), *setting.aliases]
        options: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS}
        options["help"] = setting.about or argparse.SUPPRESS
        if setting.kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = _argument_type(setting)
            options["metavar"] = "NAME" if setting.kind is str else "N"
        if setting.bare is not None:
            options.update(nargs="?", const=setting.bare)
        if setting.is_list:
            options["action"] = "append"
        group.add_argument(*names, **options)


def _argument_type(setting: Setting) -> Any:
    parse = setting.parse
    if parse is None:
        return setting.kind

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def configs_from(args: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """Returns the configurations: defaults, then the TOML file, then the flags.

    Raises:
      ConfigError: a file cannot be read, or a value is refused.
    """
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(args).items()
    }
    engine, server = EngineConfig(), ServerConfig()
    if getattr(args, "config", None) is not None:
        engine, server = load_toml(args.config)
    key = os.environ.get("JAXINFER_API_KEY")
    if key is not None and "api_key" not in values:
        values["api_key"] = (*server.api_key, key)
    return override(engine, values), override(server, values)


def models_from(
    args: argparse.Namespace, engine: EngineConfig, server: ServerConfig
) -> tuple[ModelEntry, ...]:
    """Returns the models to serve: those of --config-path, else the one of the flags.

    Raises:
      ConfigError: the file cannot be used, or a model is named beside it.
    """
    path = args.config_path
    if path is None:
        return (ModelEntry(engine, server.served_model_name),)
    if engine.model is not None:
        raise ConfigError(
            f"config_path {path!r} names the models, and so does model {engine.model!r}; leave one "
            "of them out"
        )
    first, *others = load_models(path, engine)
    # Without a name in the request it is the first one that answers: it gets the further names.
    names = tuple(dict.fromkeys((*first.names, *server.served_model_name)))
    for name in names[len(first.names) :]:
        if any(name in entry.names for entry in others):
            raise ConfigError(f"served_model_name {name!r} is another model's in {path}")
    return (replace(first, names=names), *others)


def prepare_process(
    engine_config: EngineConfig, log_level: str = "info", log_format: str = "text"
) -> None:
    """Sets what has to be in place before jax is imported: CPU threads, memory and logging."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(log_format))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("jaxinfer").setLevel(log_level.upper())
    cpu.set_num_threads(engine_config.num_threads)
    os.environ.setdefault(XLA_FRACTION, f"{engine_config.gpu_memory_utilization:g}")
    if os.environ.get("MISTRALRS_USE_PAGEABLE_KERNELS", "0") != "0":
        logging.getLogger("jaxinfer").info(
            "MISTRALRS_USE_PAGEABLE_KERNELS is set: the KV cache is always paged here"
        )


class _ConfigOrTemplate(argparse.Action):
    """`-c X.toml` is a configuration; `-c NAME` is a chat template."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        target = "config" if str(values).endswith(".toml") else "chat_template"
        setattr(namespace, target, values)


def _parser(words: list[str]) -> argparse.ArgumentParser:
    """Returns the parser for a line of such first two words.

    What imports jax adds its flags only when it is called.
    """
    command = words[:1]
    parser = argparse.ArgumentParser(
        prog="jaxinfer",
        description="LLM inference on TPU, GPU and CPU.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"jaxinfer {version_of('jaxinfer')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = _add_command(commands, "serve", "serve a model over OpenAI's HTTP API", _serve)
    _add_serve(serve)
    bench = _add_command(commands, "bench", "measure throughput and latency", _bench)
    if command == ["bench"]:
        _add_bench(bench, words[1:])
    evaluate = _add_command(commands, "eval", "judge a model on a text", _eval)
    if command == ["eval"]:
        from jaxinfer import eval_cli

        for measure in eval_cli.add_measures(evaluate):
            add_settings(measure, EngineConfig)
    convert = _add_command(commands, "convert", "write a model as safetensors, quantized", _convert)
    if command == ["convert"]:
        from jaxinfer import convert as convert_module

        convert_module.add_arguments(convert)
    plan = _add_command(commands, "plan", "say what a model would take, loading nothing", _plan)
    if command == ["plan"]:
        from jaxinfer import plan_cli

        plan_cli.add_arguments(plan)
        add_settings(plan, EngineConfig)
    profile = _add_command(commands, "profile", "say where a step's time goes", _profile)
    if command == ["profile"]:
        from jaxinfer import profile_cli

        profile_cli.add_arguments(profile)
        add_settings(profile, EngineConfig)
    _add_command(commands, "doctor", "print versions, devices and caches", _doctor)
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE.toml",
        default=None,
        help="settings in a file; flags override it",
    )
    parser.add_argument(
        "-c",
        action=_ConfigOrTemplate,
        dest="config_or_template",
        default=argparse.SUPPRESS,
        metavar="X",
        help="--config if it ends in .toml, else --chat-template",
    )
    parser.add_argument(
        "--config-path",
        metavar="FILE.json",
        default=None,
        help='several models, {"models": [{"name", "path", "chat_template"}]}; excludes --model',
    )
    add_settings(parser, EngineConfig)
    add_settings(parser, ServerConfig)


def _add_bench(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Adds the flags of `bench`, or of the one of its two parts that is asked for."""
    parts = {
        "serve": ("load a server, and measure what its clients see", _bench_serve),
        "step": ("measure every compiled program", _bench_step),
    }
    if words and words[0] in parts:
        part = _add_command(parser.add_subparsers(required=True), words[0], *parts[words[0]])
        if words == ["serve"]:
            from jaxinfer import bench_serve

            bench_serve.add_arguments(part)
        else:
            from jaxinfer import bench_step

            bench_step.add_arguments(part)
            add_settings(part, EngineConfig)
        return
    from jaxinfer import bench

    lines = [f"`jaxinfer bench {name}`: {about}" for name, (about, _) in parts.items()]
    parser.epilog = "also: " + "; ".join(lines)
    bench.add_arguments(parser)
    add_settings(parser, EngineConfig)


def _add_command(commands: Any, name: str, summary: str, run: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary, allow_abbrev=False
    )
    command.set_defaults(run=run)
    return command


def _serve(args: argparse.Namespace) -> int:
    engine_config, server_config = configs_from(args)
    models = models_from(args, engine_config, server_config)
    prepare_process(engine_config, server_config.log_level, server_config.log_format)
    with paused_collection():
        from jaxinfer.server.serving import serve

        gc.freeze()  # modules stay: no collection need look at them, the one due now included

    return serve(models, server_config)


def _bench(args: argparse.Namespace) -> int:
    from jaxinfer import bench

    engine, _ = configs_from(args)
    config = bench.engine_config(engine, args)
    prepare_process(config)
    return bench.run(config, args)


def _bench_serve(args: argparse.Namespace) -> int:
    from jaxinfer import bench_serve

    return bench_serve.run(args)


def _bench_step(args: argparse.Namespace) -> int:
    from jaxinfer import bench_step

    engine, _ = configs_from(args)
    config = bench_step.engine_config(engine, args)
    prepare_process(config, "warning" if args.json else "info")
    return bench_step.run(config, args)


def _profile(args: argparse.Namespace) -> int:
    from jaxinfer import profile_cli

    engine, _ = configs_from(args)
    config = profile_cli.engine_config(engine, args)
    prepare_process(config, "warning" if args.json else "info")
    return profile_cli.run(config, args)


def _eval(args: argparse.Namespace) -> int:
    from jaxinfer import eval_cli

    config, _ = configs_from(args)
    prepare_process(config, "warning" if args.json else "info")
    return eval_cli.run(config, args)


def _convert(args: argparse.Namespace) -> int:
    from jaxinfer import convert

    prepare_process(EngineConfig())
    return convert.run(args)


def _plan(args: argparse.Namespace) -> int:
    from jaxinfer import plan_cli

    config, _ = configs_from(args)
    prepare_process(config, "warning" if args.json else "info")
    return plan_cli.run(config, args)


def _doctor(args: argparse.Namespace) -> int:
    from jaxinfer.checkpoint.default_model import cache_directory

    print(f"{'python':<12}{platform.python_version()} on {platform.platform()}")
    for name in _DISTRIBUTIONS:
        print(f"{name:<12}{version_of(name)}")
    print(f"{'cpu':<12}{os.cpu_count()} cores, {_cpu_features()}")
    cache = cache_directory()
    print(f"{'models':<12}{cache}{'' if cache.exists() else ' (not there yet)'}")
    try:
        import jax

        for device in jax.devices():
            stats = device.memory_stats() or {}
            limit = stats.get("bytes_limit")
            memory = "" if limit is None else f", {limit / 2**30:.1f} GiB usable"
            print(f"{'device':<12}{device.id}: {device.platform}, {device.device_kind}{memory}")
    except (ImportError, RuntimeError) as error:
        print(f"{'device':<12}none: {error}")
        print("install an accelerator's jax (pip install 'jaxinfer[cuda]' or '[tpu]'), or set")
        print("JAX_PLATFORMS=cpu to run on the CPU")
        return EXIT_FAILURE
    return EXIT_OK


def _cpu_features() -> str:
    wanted = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd", "sve")
    words = set(cpu.features().split())
    return " ".join(name for name in wanted if name in words) or "no vector extension known to us"
