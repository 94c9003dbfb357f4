# SPDX-License-Identifier: Apache-2.0
"""Calls of a StreamingAttention from within its own calls, and in a forked child: right or refused, never stuck."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time

import compare
import processes
import pytest
import tiledattn as ta
from streamed import LONG, TILE, attend, make_source, make_streaming, sequences_of, small, tiles_by_hand


def _refusals(streaming, data, sequences):
    """The messages of the calls that wait."""
    calls = (
        lambda: streaming.attend(data.q, sequences),
        lambda: streaming.prefetch(sequences),
        streaming.discard,
    )
    messages = []
    for call in calls:
        with pytest.raises(ValueError, match="StreamingAttention: called") as raised:
            call()
        messages.append(str(raised.value))
    return messages


def test_a_source_cannot_call_what_waits_for_it(device):
    data, source, streaming, sequences = small(device)
    messages = []

    def before_read(blocks):
        messages.extend(_refusals(streaming, data, sequences))
        str(streaming.stats)
        streaming.reset_stats()

    source.before_read = before_read
    got = attend(device, streaming, data, sequences)
    compare.same_bits(got, tiles_by_hand(device, data, TILE, 5))
    assert len(messages) >= 3
    assert all("read() of a source that the same object waits for" in message for message in messages)


def test_a_source_can_call_another_object_and_cancel_its_own(device):
    data, source, streaming, sequences = small(device)
    want = tiles_by_hand(device, data, TILE, 5)
    _, _, other, others = small(device, "host")
    inner = []
    source.before_read = lambda blocks: inner.append(attend(device, other, data, others))
    compare.same_bits(attend(device, streaming, data, sequences), want)
    compare.same_bits(inner[0], want)
    source.before_read = lambda blocks: streaming.cancel()
    with pytest.raises(ta.CancelledError):
        attend(device, streaming, data, sequences)


def test_a_pin_cannot_call_what_waits_for_it(device):
    data = LONG.make("float32")
    source, streaming = make_source("read", device, data), make_streaming(device, data)
    source.pin = lambda blocks: streaming.discard()
    with pytest.raises(ta.TileError, match=r"in the middle of a call .* pin\(\)"):
        attend(device, streaming, data, sequences_of(data, source))


@pytest.mark.skipif(sys.platform == "win32", reason="needs setitimer")
@pytest.mark.parametrize("call", ["attend", "prefetch", "discard"])
def test_a_signal_handler_cannot_call_what_it_interrupts(cpu, call):
    data, source, streaming, sequences = small(cpu)
    source.before_read = lambda blocks: time.sleep(0.2)
    args = {"attend": (data.q, sequences), "prefetch": (sequences,), "discard": ()}[call]
    former = signal.signal(signal.SIGALRM, lambda *_: getattr(streaming, call)(*args))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(ValueError, match=r"in the middle of a call .* by the same thread"):
            attend(cpu, streaming, data, sequences)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    source.before_read = lambda blocks: None
    compare.same_bits(attend(cpu, streaming, data, sequences), tiles_by_hand(cpu, data, TILE, 5))


def test_the_last_reference_may_go_in_a_read(device):
    data, source, streaming, sequences = small(device)
    held, dropped, go = [streaming], threading.Event(), threading.Event()
    del streaming

    def before_read(blocks):
        go.wait()
        held.clear()
        gc.collect()
        dropped.set()

    source.before_read = before_read
    assert held[0].prefetch(sequences)
    go.set()
    assert dropped.wait(60)
    source.before_read = lambda blocks: None
    got = attend(device, make_streaming(device, data), data, sequences)
    compare.same_bits(got, tiles_by_hand(device, data, TILE, 5))


FORKED = """
import os, signal, sys, threading, time, warnings
import numpy as np
import tiledattn as ta
import compare
from arrays import make_carrier
from streamed import TILE, attend, make_streaming, small, tiles_by_hand
warnings.simplefilter("ignore", DeprecationWarning)
CPU = make_carrier("cpu")
data, source, streaming, sequences = small(CPU)
want = tiles_by_hand(CPU, data, TILE, 5)

def check(streaming, source=source):
    source.before_read = lambda blocks: None
    compare.same_bits(attend(CPU, streaming, data, sequences), want)

def refused(call, *args):
    try:
        call(*args)
    except ValueError as error:
        return "forked in the middle of a call" in str(error)
    return False

def in_child(body):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        body()
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

"""


def _forked(code, children):
    said = processes.run(FORKED + code)
    assert said.split() == ["0"] * children, said


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_forked_child_uses_drops_or_ignores_an_object():
    code = """
def use_and_drop():
    global streaming
    check(streaming)
    check(streaming)
    del streaming

def drop():
    global streaming
    del streaming

check(streaming)
if os.fork() == 0:  # at exit it is still there
    sys.exit(0)
os.wait()
in_child(lambda: None)
in_child(use_and_drop)
in_child(lambda: check(streaming))
in_child(drop)
def leave_reads_under_way():
    source.before_read = lambda blocks: time.sleep(0.1)
    streaming.prefetch(sequences)
in_child(leave_reads_under_way)
check(streaming)
"""
    _forked(code, 5)


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_forked_child_does_not_wait_for_what_was_prefetched():
    code = """
source.before_read = lambda blocks: time.sleep(0.1)
streaming.prefetch(sequences)
in_child(lambda: None)
in_child(streaming.discard)
in_child(lambda: check(streaming))
compare.same_bits(attend(CPU, streaming, data, sequences), want)
assert streaming.stats.dropped_launches == 0
"""
    _forked(code, 3)


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_forked_child_is_told_of_a_call_that_will_not_end():
    code = """
reading = threading.Event()
def before_read(blocks):
    reading.set()
    time.sleep(0.3)
source.before_read = before_read
thread = threading.Thread(target=attend, args=(CPU, streaming, data, sequences))
thread.start()
reading.wait()

def child():
    assert refused(streaming.attend, data.q, sequences)
    assert refused(streaming.prefetch, sequences)
    streaming.discard()
    assert not streaming.cancel()
    str(streaming.stats)
    streaming.reset_stats()
    check(make_streaming(CPU, data))

in_child(child)
in_child(lambda: None)
thread.join()
check(streaming)
"""
    _forked(code, 2)


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_signal_handler_that_forks():
    """In the parent the call goes on, in the child it ends."""
    code = """
parent, children = os.getpid(), []
def handler(*_):
    sys.stdout.flush()
    children.append(os.fork())
    if children[0] == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
source.before_read = lambda blocks: time.sleep(0.2)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.1)
if os.getpid() == parent:
    ended = refused(attend, CPU, streaming, data, sequences)
if os.getpid() == parent:
    assert not ended
    print(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
else:
    assert ended
    check(streaming)
"""
    _forked(code, 1)
