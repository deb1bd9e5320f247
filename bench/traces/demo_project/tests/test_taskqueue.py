from tally.taskqueue import Queue

from tests.check import equal, refused


def queue_of(*names):
    queue = Queue()
    for name in names:
        queue.add(name)
    return queue


def test_lower_numbers_go_first():
    queue = queue_of("lint")
    queue.add("build", priority=1)
    equal(queue.take().name, "build")


def test_equals_go_in_the_order_they_came():
    queue = queue_of("zip", "copy", "build")
    equal([queue.take().name for _ in range(3)], ["zip", "copy", "build"])


def test_needs_are_waited_for():
    queue = queue_of("build")
    queue.add("test", priority=1, needs=["build"])
    equal(queue.take().name, "build")
    equal(queue.take(), None)
    queue.finish("build")
    equal(queue.take().name, "test")


def test_two_retries_are_three_tries():
    queue = Queue()
    queue.add("flaky", retries=2)
    tries = 0
    while queue.take() is not None:
        tries += 1
        queue.fail("flaky")
    equal(tries, 3)
    equal(queue.failed, ["flaky"])


def test_a_name_is_queued_once():
    queue = queue_of("build")
    refused(ValueError, queue.add, "build")
