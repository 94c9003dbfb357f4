# SPDX-License-Identifier: Apache-2.0
"""Threads and processes: one object for each thread is safe, one object in two threads never corrupts."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import calls
import cases
import compare
import processes
import pytest
import reference
import tiledattn as ta


def test_functions_from_many_threads(device):
    problems = [cases.Paged("", seq_lens=(100 + 7 * i, 3)).make("float32", seed=i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            got = list(pool.map(lambda data: calls.run_paged(device, data), problems))
            for result, data in zip(got, problems, strict=True):
                compare.result_close(result, calls.want_paged(data), "float32")


def test_one_object_for_each_thread(device):
    case = cases.Tiled("", cases.Paged("", seq_lens=(40, 96)))
    problems = [case.make("float32", seed=i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda data: calls.run_tiled(device, data), problems))
    for result, data in zip(got, problems, strict=True):
        compare.result_close(result, calls.want_tiled(data).finalize(), "float32")


def test_one_object_in_two_threads_raises_or_is_serialised(cpu):
    """Every call adds the same keys: whatever the order, l is a whole multiple of one call's."""
    data = cases.Tiled("", cases.Paged("", seq_lens=(1000,)), tile_blocks=(63,)).make("float32")
    attn = calls.make_attention(cpu, data)
    attn.begin_step(1)
    calls.step(cpu, attn, data, data.tiles[0])
    (_, one, _) = calls.state_arrays(cpu, attn, 1)
    attn.begin_step(1)
    done, refused, start = [], [], threading.Barrier(2)

    def work():
        start.wait()
        for _ in range(20):
            try:
                calls.step(cpu, attn, data, data.tiles[0])
                done.append(1)
            except (RuntimeError, ValueError) as error:
                refused.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) + len(refused) == 40
    assert done
    assert all("thread" in message for message in refused)
    _, l, _ = calls.state_arrays(cpu, attn, 1)
    assert abs(l / one - len(done)).max() < 1e-3 * len(done)


def test_the_gil_is_released_during_cpu_work(cpu):
    """While a long call runs, another Python thread makes progress."""
    qkv, _ = cases.Flash("", q_len=2500, kv_len=2500, num_q_heads=8).make("float32")
    ticks, finished = 0, threading.Event()

    def work():
        ta.flash_attention(*qkv)
        finished.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not finished.wait(0.0005):
        ticks += 1
    thread.join()
    assert ticks >= 5


def test_thread_count_changes_between_calls_of_other_threads(cpu):
    data = cases.Paged("", seq_lens=(300, 20)).make("float32")
    want, before = calls.run_paged(cpu, data), ta.get_num_threads()

    def work(i):
        ta.set_num_threads(1 + i % 4)
        return calls.run_paged(cpu, data)

    try:
        with ThreadPoolExecutor(4) as pool:
            for got in pool.map(work, range(40)):
                compare.same_bits(got, want)
    finally:
        ta.set_num_threads(before)


THREADS = """
import numpy as np, tiledattn as ta
x = np.ones((1, 1, 1, 8), np.float32)
try:
    ta.flash_attention(x, x, x)
    print(ta.get_num_threads())
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("number", [1, 7, 1024])
def test_numbers_of_threads_from_both_sides(number):
    """The environment and the function take the same numbers."""
    assert processes.run(THREADS, TILEDATTN_NUM_THREADS=str(number)).strip() == str(number)
    before = ta.get_num_threads()
    ta.set_num_threads(number)
    assert ta.get_num_threads() == number
    ta.set_num_threads(before)


@pytest.mark.parametrize("number", [0, -1, 1025, 4096, 2**32 + 1, 2**63 - 1, 2**64])
def test_numbers_of_threads_refused_from_both_sides(number):
    said = processes.run(THREADS, TILEDATTN_NUM_THREADS=str(number)).strip()
    assert said == f'TILEDATTN_NUM_THREADS: got "{number}"; expected 1 to 1024'
    before = ta.get_num_threads()
    expected = "1 to 1024" if number < 2**63 else "a 64-bit number"
    with pytest.raises(ValueError, match=f"^num_threads: got {number}; expected {expected}$"):
        ta.set_num_threads(number)
    assert ta.get_num_threads() == before


@pytest.mark.parametrize("text", ["many", "4 threads", "3.0", "0x10"])
def test_texts_that_are_no_number_of_threads(text):
    said = processes.run(THREADS, TILEDATTN_NUM_THREADS=text).strip()
    assert said == f'TILEDATTN_NUM_THREADS: got "{text}"; expected 1 to 1024'


def test_a_forked_child_computes():
    """The thread pool of the parent does not exist in the child; the child must not wait for it."""
    code = """
import os, signal, warnings
import numpy as np, tiledattn as ta
warnings.simplefilter("ignore", DeprecationWarning)
x = np.ones((4, 64, 4, 16), np.float32)
ta.set_num_threads(2)
assert (ta.flash_attention(x, x, x) == 1).all()
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(0 if (ta.flash_attention(x, x, x) == 1).all() else 1)
print(os.waitpid(child, 0)[1])
"""
    assert processes.run(code).strip() == "0"


def test_threads_end_with_the_process():
    """A call in a daemon thread at exit neither hangs nor crashes."""
    code = """
import threading, numpy as np, tiledattn as ta
x = np.ones((4, 64, 4, 16), np.float32)
threading.Thread(target=lambda: [ta.flash_attention(x, x, x) for _ in range(10**6)], daemon=True).start()
import time; time.sleep(0.3)
print("end")
"""
    assert processes.run(code).strip() == "end"


def test_results_of_threads_of_other_devices(device, cpu):
    """CPU and GPU calls side by side."""
    data = cases.Paged("", seq_lens=(100, 3)).make("float32")
    want = reference.paged(*data.args, **data.kwargs)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(calls.run_paged, one, data) for one in (device, cpu) * 6]
        for job in jobs:
            compare.result_close(job.result(), want, "float32")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity of processes")
def test_no_more_threads_than_cores_that_the_process_may_use():
    code = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import tiledattn as ta
print(ta.get_num_threads())
"""
    assert processes.run(code, TILEDATTN_NUM_THREADS=None) == "1\n"
