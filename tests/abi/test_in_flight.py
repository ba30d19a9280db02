"""Calls that wait while something else happens: signals, abort and destroy from other threads, a fork, the queue's end.

Both ranks are threads of one process here, each scenario in a process of its own under a time limit.
"""

from __future__ import annotations

import pytest

from tests.abi import alone

SETUP = """
library = nccl.Library(HOST)

def waiting_pair(check=True):
    "A communicator of two ranks, and memory that a call of one can wait for. `check`: for signals, too."
    library.set_interrupt_check(check)
    return (*pair(library), library.mem_alloc(4096))
"""


def run_alone(code: str) -> dict:
    return alone.run_alone(SETUP + code)


# Rank 0 waits for what rank 1 does not send, and a signal arrives.
WAIT = """
ours, theirs, buffer = waiting_pair({enable})
{handler}
later(0.3, os.kill, os.getpid(), signal.{signal})
start = time.monotonic()
try:
    ours.recv(buffer, 16, FLOAT32, 1)
    answer["raised"] = None
except BaseException as error:
    answer.update(raised=type(error).__name__, text=str(error), code=getattr(error, "code", None))
answer["seconds"] = time.monotonic() - start
"""
AFTER = """
answer["closed"] = ours.handle == 0
try:
    ours.recv(buffer, 16, FLOAT32, 1)
except errors.CollectivesError as error:
    answer.update(then=type(error).__name__, then_text=str(error))
if ours.handle:
    ours.abort()
theirs.abort()
"""

END = """
ours.abort()
theirs.abort()
"""
ENOUGH = """
class Enough(Exception): pass
def enough(*_): raise Enough("that will do")
signal.signal(signal.SIGTERM, enough)
"""
TERM = "signal.signal(signal.SIGTERM, lambda *_: ours.{})"


@pytest.mark.parametrize(
    ("signal", "handler", "raised", "text", "then"),
    [
        ("SIGINT", "", "KeyboardInterrupt", "", "interrupted"),
        ("SIGTERM", ENOUGH, "Enough", "that will do", "interrupted"),
        ("SIGTERM", TERM.format("abort()"), "Aborted", "abort()", "communicator is closed"),
        # Anything else would wait for the very call that the handler interrupts.
        ("SIGTERM", TERM.format("destroy()"), "InvalidUsage", "can only abort", ""),
        ("SIGTERM", TERM.format("split(0, 0)"), "InvalidUsage", "can only abort", ""),
        ("SIGTERM", TERM.format("sequence()"), "InvalidUsage", "can only abort", ""),
    ],
    ids=["ctrl-c", "an exception", "abort", "destroy", "split", "sequence"],
)
def test_a_signal_ends_a_waiting_call(signal, handler, raised, text, then):
    answer = run_alone((WAIT + AFTER).format(enable=True, handler=handler, signal=signal))
    assert answer["raised"] == raised and text in answer["text"]
    assert 0.25 < answer["seconds"] < 10
    assert answer["then"] in ("Aborted", "InvalidUsage") and then in answer["then_text"]
    assert answer["closed"] == (raised == "Aborted")


def test_a_handler_that_raises_nothing_leaves_the_call_alone():
    handler = """
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(ours.pending().op))
def serve():
    theirs.send(library.mem_alloc(4096), 16, FLOAT32, 0)
later(0.8, serve)
"""
    code = WAIT.format(enable=True, handler=handler, signal="SIGUSR1")
    answer = run_alone(code + 'answer["seen"] = seen' + END)
    assert answer["raised"] is None and answer["seen"] == ["recv"]
    assert answer["seconds"] > 0.7


def test_signals_wait_where_the_check_is_off():
    """Without the check a handler runs when the call has come back, as around any C function."""
    handler = """
signal.signal(signal.SIGUSR1, lambda *_: None)
later(0.9, lambda: theirs.send(library.mem_alloc(4096), 16, FLOAT32, 0))
"""
    answer = run_alone(WAIT.format(enable=False, handler=handler, signal="SIGUSR1") + END)
    assert answer["raised"] is None and answer["seconds"] > 0.8


def test_ctrl_c_ends_the_wait_for_a_group():
    code = """
ours, theirs, buffer = waiting_pair()
signal.signal(signal.SIGTERM, lambda *_: ours.abort())
later(0.3, os.kill, os.getpid(), signal.SIGTERM)
library.group_start()
ours.recv(buffer, 16, FLOAT32, 1)
try:
    library.group_end()
except errors.Aborted as error:
    answer.update(op=error.op, closed=ours.handle == 0)
theirs.abort()
"""
    answer = run_alone(code)
    assert answer["op"] == "group_end" and answer["closed"]


def test_ctrl_c_ends_the_wait_for_other_ranks_at_init():
    code = """
library.set_interrupt_check(True)
later(0.3, os.kill, os.getpid(), signal.SIGINT)
try:
    library.comm_init_rank(2, library.get_unique_id(), 0)
except KeyboardInterrupt:
    answer["interrupted"] = True
"""
    assert run_alone(code)["interrupted"]


def test_abort_from_another_thread():
    code = """
answer["raised"] = []
for _ in range(20):
    ours, theirs = pair(library)
    buffer = library.mem_alloc(4096)
    other = threading.Timer(0.01, ours.abort)
    other.start()
    try:
        while True:
            ours.recv(buffer, 16, FLOAT32, 1)
    except errors.CollectivesError as error:
        answer["raised"].append([type(error).__name__, str(error), error.rank])
    other.join()
    theirs.abort()
    library.mem_free(buffer)
answer["left"] = library.memory_in_use()
"""
    answer = run_alone(code)
    assert len(answer["raised"]) == 20
    for kind, text, rank in answer["raised"]:
        assert (kind == "Aborted" and "abort() closed" in text) or (kind == "InvalidUsage" and "closed" in text)
        assert rank == 0
    assert answer["left"] == 0


def test_many_threads_call_while_one_aborts():
    """The handle is taken under the GIL and used outside it: no call may reach a communicator that is gone."""
    code = """
ended = []
def caller(comm):
    try:
        while True:
            comm.sequence(); comm.async_error(); comm.pending(); comm.all_reduce(0, 0, 0, FLOAT32, SUM)
    except errors.CollectivesError as error:
        ended.append(type(error).__name__)
for _ in range(30):
    comm = library.comm_init_rank(1, library.get_unique_id(), 0)
    threads = [threading.Thread(target=caller, args=(comm,)) for _ in range(4)]
    [each.start() for each in threads]
    time.sleep(0.01)
    comm.abort()
    [each.join() for each in threads]
answer.update(ended=sorted(set(ended)), count=len(ended), left=library.memory_in_use())
"""
    answer = run_alone(code)
    assert answer["count"] == 120 and set(answer["ended"]) <= {"InvalidUsage", "Aborted"}
    assert answer["left"] == 0


def test_destroy_waits_for_the_calls_of_other_threads():
    code = """
ours, theirs, buffer = waiting_pair()
def receive():
    ours.recv(buffer, 16, FLOAT32, 1)
    answer["received"] = True
receiver = threading.Thread(target=receive)
receiver.start()
time.sleep(0.2)
later(0.3, theirs.send, library.mem_alloc(4096), 16, FLOAT32, 0)
start = time.monotonic()
ours.destroy()
answer["seconds"] = time.monotonic() - start
receiver.join()
theirs.destroy()
"""
    answer = run_alone(code)
    assert answer["received"] and 0.2 < answer["seconds"] < 10


def test_ctrl_c_while_destroy_waits_keeps_the_communicator():
    code = """
ours, theirs, buffer = waiting_pair()
receiver = threading.Thread(target=lambda: ours.recv(buffer, 16, FLOAT32, 1))
receiver.start()
time.sleep(0.2)
later(0.2, os.kill, os.getpid(), signal.SIGINT)
try:
    ours.destroy()
except KeyboardInterrupt:
    answer["open"] = ours.handle != 0
theirs.send(library.mem_alloc(4096), 16, FLOAT32, 0)
receiver.join()
ours.destroy()
theirs.destroy()
"""
    assert run_alone(code)["open"]


def test_a_forked_child_is_refused():
    code = """
comm, queue = library.comm_init_rank(1, library.get_unique_id(), 0), library.queue_create()
reading, writing = os.pipe()
if os.fork() == 0:
    words = []
    for call in (lambda: comm.all_reduce(0, 0, 0, FLOAT32, SUM), comm.abort, comm.destroy, queue.record, queue.close):
        try:
            call()
            words.append("no error")
        except errors.InvalidUsage as error:
            words.append(str(error))
    del comm, queue
    own = library.comm_init_rank(1, library.get_unique_id(), 0)     # a communicator of its own works
    own.all_reduce(0, 0, 0, FLOAT32, SUM)
    own.destroy()
    os.write(writing, json.dumps(words).encode())
    os._exit(0)
os.close(writing)
with os.fdopen(reading) as child:
    answer["child"] = json.load(child)
os.wait()
comm.all_reduce(0, 0, 0, FLOAT32, SUM)
comm.destroy()
queue.close()
"""
    answer = run_alone(code)
    assert len(answer["child"]) == 5
    assert all("parent process" in words for words in answer["child"])
    assert "ResourceWarning" not in answer["stderr"]


def test_queues():
    code = """
queue = library.queue_create()
gate, ran = threading.Event(), []
answer["empty"] = [queue.record(), queue.wait(0), queue.done(0)]
queue.call(gate.wait)
queue.call(lambda: ran.append(threading.get_native_id()))
ticket = queue.record()
start = time.monotonic()
answer["early"] = [ticket, queue.done(ticket), queue.wait(ticket, 0), queue.wait(ticket, 0.25)]
answer["waited"] = time.monotonic() - start
answer["pending"] = queue.get(nccl.QUEUE_PENDING)
gate.set()
answer["late"] = [queue.wait(ticket), queue.done(ticket), queue.wait(ticket, 1e12), queue.get(nccl.QUEUE_PENDING)]
answer["thread"] = ran == [queue.get(nccl.QUEUE_THREAD_ID)] and ran != [threading.get_native_id()]
unraisable = []
sys.unraisablehook = lambda info: unraisable.append([info.exc_type.__name__, callable(info.object)])
queue.call(lambda: 1 / 0)
queue.wait(queue.record())
answer["unraisable"] = unraisable
gate.clear()
queue.call(lambda: gate.wait(30))
answer["interrupted"] = []
for call in (lambda: queue.wait(queue.record()), queue.close):
    later(0.3, os.kill, os.getpid(), signal.SIGINT)
    try:
        call()
    except KeyboardInterrupt:
        answer["interrupted"].append(queue.handle != 0)
gate.set()
queue.close()
queue.close()
try:
    queue.record()
except errors.InvalidUsage as error:
    answer["closed"] = str(error)
"""
    answer = run_alone(code)
    assert answer["empty"] == [0, True, True]
    assert answer["early"] == [2, False, False, False] and answer["pending"] == 2
    assert 0.2 < answer["waited"] < 10
    assert answer["late"] == [True, True, True, 0] and answer["thread"]
    assert answer["unraisable"] == [["ZeroDivisionError", True]]
    assert answer["interrupted"] == [True, True]  # and the queue stays open
    assert answer["closed"] == "queue is closed"


def test_what_is_left_open_is_said_once_and_never_waited_for():
    code = """
import gc, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    ours, theirs = pair(library)
    queue = library.queue_create()
    del ours, theirs, queue
    gc.collect()
answer["caught"] = [[each.category.__name__, str(each.message)] for each in caught]
"""
    caught = run_alone(code)["caught"]
    assert [kind for kind, _ in caught] == ["ResourceWarning"] * 3
    assert sum("never destroyed" in text for _, text in caught) == 2
