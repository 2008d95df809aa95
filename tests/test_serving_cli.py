import re
from dataclasses import replace

import pytest

from dsv4lab import cli
from dsv4lab.serving import launch, presets, settings, stages
from dsv4lab.serving.launch import ServeError


class FakeServer:
    """In the place of launch.Server: notes what it is to serve, and ends at once."""

    url, ranks, log = "http://127.0.0.1:30000", 8, "server.log"
    error: Exception | None = None
    config: launch.Config
    ended = False

    def __init__(self, config, say):
        type(self).config, self.say = config, say

    def __enter__(self):
        self.say("loading weights")
        if self.error:
            raise self.error
        return self

    def __exit__(self, *_):
        type(self).ended = True

    def wait(self) -> None:
        self.say("ended")


@pytest.fixture
def server(monkeypatch) -> type[FakeServer]:
    class Server(FakeServer):
        pass

    monkeypatch.setattr(launch, "Server", Server)
    return Server


def status(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    return caught.value.code


def test_serve_says_where_and_what_is_live(server, capsys):
    assert status("serve", "a/b", "--preset", "rtx6000-8x", "--tp", "8", "--context-length", "8192") == 0
    wanted = launch.Config(model="a/b", preset="rtx6000-8x", tp=8, context_length=8192)
    assert replace(server.config, timeout_s=wanted.timeout_s) == wanted
    assert server.ended
    out = capsys.readouterr().out
    assert "loading weights" in out
    assert "hooks live on 8 ranks: attention=gluon, indexer=triton, topk=triton" in out


def test_what_comes_after_two_dashes_is_sglangs(server):
    assert status("serve", "--preset", "synthetic", "--", "--mem-fraction-static", "0.5", "--model-path=x", "--") == 0
    assert server.config.model == ""
    assert server.config.flags == ("--mem-fraction-static", "0.5", "--model-path=x", "--")


def test_hooks_are_those_of_the_preset_unless_given(server):
    status("serve", "--preset", "synthetic", "--hooks", "topk=triton")
    assert server.config.hooks == settings.Setting(topk="triton")
    status("serve", "--preset", "synthetic", "--hooks", "")
    assert server.config.hooks.active == {}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "model must be given: preset single has no synthetic one"),
        (["--preset", "nothing"], "preset must be one of rtx6000-8x, "),
        (["a/b", "--hooks", "moe=bf16"], "DSV4LAB: there is no 'moe'"),
        (["a/b", "--", "--api-key=x"], "--api-key would show on the command line"),
    ],
)
def test_what_the_user_got_wrong_is_one_line_and_status_2(server, capsys, args, says):
    assert status("serve", *args) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"dsv4lab: {says}") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [(ServeError("topk=triton is live on no rank"), 1), (ValueError("port"), 2), (PermissionError("no /out"), 2)],
)
def test_a_start_that_fails_has_a_status(server, capsys, error, code):
    server.error = error
    assert status("serve", "a/b") == code
    assert capsys.readouterr().err == f"dsv4lab: {error}\n"


@pytest.mark.parametrize(
    ("command", "names"),
    [("serve", presets.PRESETS), ("bench", ()), ("campaign", stages.LEGS), ("parity", ())],
)
def test_help_teaches_with_an_example_and_all_names(capsys, command, names):
    assert status(command, "--help") == 0
    said = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert f"Example: dsv4lab {command}" in said
    assert not [name for name in names if name not in said]
