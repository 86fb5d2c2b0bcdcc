"""Answers that are far too large, or still on their way, do not keep the others waiting."""

from collections import Counter
from types import SimpleNamespace

import pytest
from flwr.app import Array, ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

from fedssl.engines.flower.messenger import ArrivingAnswer, Messenger, TooLarge


class ServedGrid(HttpGrid):
    """Flower's grid between machines, with a stand-in for the SuperLink that has some answers and their objects."""

    def __init__(self, answers: dict[str, tuple[ProtoMessage, ObjectTree]], objects: dict[str, bytes]):
        super().__init__(token="token")
        self.set_run(Run.create_empty(1))
        self.answers, self.objects = dict(answers), objects
        self.on_their_way: list[str] = []  # objects that have not arrived
        self.given_up = False  # by the SuperLink, on those objects
        self.reads: Counter[str] = Counter()
        self._client = SimpleNamespace(
            PullMessages=self.pull_answer, PullObject=self.pull_object, ConfirmMessageReceived=lambda request: None
        )

    def pull_answer(self, request):
        (name,) = request.message_ids
        if name not in self.answers:
            return PullAppMessagesResponse()
        message, tree = self.answers.pop(name)  # the SuperLink gives an answer once
        return PullAppMessagesResponse(messages_list=[message], message_object_trees=[tree])

    def pull_object(self, request):
        name = request.object_id
        self.reads[name] += 1
        if name in self.on_their_way:
            return PullObjectResponse(object_found=not self.given_up)
        return PullObjectResponse(object_found=True, object_available=True, object_content=self.objects.get(name, b""))


PIECES = (ArrayChunk(memoryview(b"%4d" % i + bytes(2**16))).deflate() for i in range(500))
RECORDS = (ConfigRecord({"text": f"{i} " + "x" * 2**16}).deflate() for i in range(500))


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (PIECES, "its answer is larger than 4194304 bytes"),
        (RECORDS, "its answer's records are larger than 4194304 bytes"),
        ([b"nonsense"], "its answer cannot be read: not enough values to unpack"),
    ],
    ids=["pieces", "records", "nonsense"],
)
def test_an_answer_that_is_far_too_large_is_given_up_on_its_way(contents, reason):
    objects = {f"piece {i}": content for i, content in enumerate(contents)}
    tree = ObjectTree(object_id="message", children=[ObjectTree(object_id=name) for name in objects])
    grid = ServedGrid({"asked": (ProtoMessage(), tree)}, objects)
    [answer] = Messenger(grid).collect({"asked": 11}, 0.0, 2**22)
    assert (answer.node, answer.content) == (11, None)
    assert answer.failure.startswith(reason)
    assert grid.reads.total() < 1100


@pytest.fixture
def grid() -> ServedGrid:
    """The answer to `slow` is announced at once, but the objects that it does not share with the other arrive later."""
    answers, objects, names = {}, {}, {}
    for name in ("slow", "quick"):
        content = RecordDict({"answer": ConfigRecord({"of": name, "text": [f"{name} {i}" for i in range(5)]})})
        message = FlowerMessage(content, dst_node_id=1, message_type="train")
        message.metadata.__dict__["_reply_to_message_id"] = name
        objects |= {key: part.deflate() for key, part in get_all_nested_objects(message).items()}
        tree, proto = get_object_tree(message), message_to_proto(message)
        proto.metadata.message_id = tree.object_id
        answers[name] = proto, tree
        names[name] = [node.object_id for node in iterate_object_tree(tree)]
    served = ServedGrid(answers, objects)
    served.on_their_way = [name for name in names["slow"] if name not in names["quick"]]
    return served


def test_an_answer_that_is_still_uploaded_does_not_keep_the_others_waiting(grid):
    slow = list(grid.on_their_way)
    assert len(slow) > 1
    messenger = Messenger(grid)
    waiting = {"slow": 11, "quick": 12}
    (answer,) = messenger.collect(waiting, 0.0, 2**20)
    assert (answer.node, answer.content["answer"]["of"]) == (12, "quick")
    assert waiting == {"slow": 11}
    while len(grid.on_their_way) > 1:
        grid.on_their_way.pop(0)
        for _ in range(2):
            assert list(messenger.collect(waiting, 0.0, 2**20)) == []
    grid.on_their_way.clear()
    (answer,) = messenger.collect(waiting, 0.0, 2**20)
    assert (answer.node, answer.content["answer"]["of"]) == (11, "slow")
    assert waiting == {}
    # each is read once while others are missing and once for the whole; looked for at most twice a step before
    assert all(grid.reads[name] <= 4 + 2 * len(slow) for name in slow)
    assert grid.reads[slow[0]] <= 4


def test_an_answer_that_is_never_uploaded_is_given_up(grid):
    messenger = Messenger(grid)
    waiting = {"slow": 11, "quick": 12}
    (answer,) = messenger.collect(waiting, 0.5, 2**20)  # Flower would wait for two hours
    assert (answer.node, waiting) == (12, {"slow": 11})
    grid.given_up = True
    (answer,) = messenger.collect(waiting, 0.0, 2**20)
    assert (answer.node, answer.content, answer.failure) == (11, None, "no answer in time")


@pytest.mark.parametrize("array_first", [True, False])
def test_equal_pieces_count_as_often_as_an_array_refers_to_them(array_first):
    """Four equal pieces of 5 MiB, which Flower sends as one."""
    array = Array("uint8", (4 * 5 * 2**20,), "torch.raw", bytes(4 * 5 * 2**20))
    objects = {name: part.deflate() for name, part in get_all_nested_objects(array).items()}
    assert sum(map(len, objects.values())) < 6 * 2**20
    piece, whole = sorted(objects, key=lambda name: len(objects[name]), reverse=True)
    first, second = (whole, piece) if array_first else (piece, whole)
    size = ArrivingAnswer(2**24)
    size.add(first, objects[first])
    with pytest.raises(TooLarge, match="larger than 16777216 bytes"):
        size.add(second, objects[second])


def test_an_answer_of_the_largest_size_is_not_given_up():
    size = ArrivingAnswer(2**24)
    for i in range(3):
        size.add(str(i), ArrayChunk(memoryview(bytes(5 * 2**20))).deflate())
        size.add(str(i), ArrayChunk(memoryview(bytes(5 * 2**20))).deflate())  # pulled twice
