"""The first error is told from its echoes, and named as CUDA names it."""

from itertools import pairwise

import pytest

from dsv4lab.capture.errors import CODES, first_error


def failed(*errors, link="__context__"):
    """The last of `errors`, each having come about while the one before was handled."""
    for before, after in pairwise(errors):
        setattr(after, link, before)
    return errors[-1]


def echo():
    return RuntimeError("CUDA error: operation failed due to a previous error during capture\nCompile with")


@pytest.mark.parametrize("code", [code for code in CODES if code != 901])
def test_by_its_text_or_its_name_behind_the_echo(code):
    name, text = CODES[code]
    for message in (f"CUDA error: {text}\nCompile with", f"Triton Error [CUDA]: {text}", f"Search for `{name}' in"):
        found = first_error(failed(RuntimeError(message), echo()))
        assert (found.code, found.name) == (code, name)
        assert found.text == f"RuntimeError: {message.splitlines()[0]}"


def test_an_echo_alone_is_what_there_is():
    assert first_error(echo()).name == "cudaErrorStreamCaptureInvalidated"


def test_what_python_refuses_has_no_code():
    first = RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless pinned")
    found = first_error(failed(KeyError("a guard"), first, echo()))
    assert (found.code, found.name) == (None, None)
    assert found.text.startswith("RuntimeError: Cannot copy")


def test_other_errors_are_told_by_their_cause():
    found = first_error(failed(ValueError("bad shape"), RuntimeError("backend failed"), link="__cause__"))
    assert found.text == "ValueError: bad shape"


@pytest.mark.parametrize("message", ["Cannot copy between CPU and CUDA tensors during CUDA graph capture", "no kernel"])
def test_what_a_backend_of_dynamo_raised_is_the_first_error(message):
    class BackendCompilerFailed(RuntimeError):
        inner_exception = ValueError(message)

    with pytest.raises(BackendCompilerFailed) as caught:
        raise BackendCompilerFailed(f"backend='inductor' raised:\nValueError: {message}") from None
    assert first_error(caught.value).text == f"ValueError: {message}"


def test_other_cuda_errors_keep_the_number_that_torch_gives():
    error = RuntimeError("CUDA error: an illegal access\nSearch for `cudaErrorIllegalAddress' in")
    error.error_code = 700
    found = first_error(error)
    assert (found.code, found.name) == (700, "cudaErrorIllegalAddress")


def test_records_get_no_folders():
    assert first_error(OSError("no file /tmp/somewhere/kernel.so")).text == "OSError: no file kernel.so"
