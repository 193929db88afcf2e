"""Reads the facts of a partitioned queue from a stream, and adds and removes its subjects. All calls block.

``lanes queue`` makes ``StreamQueues`` by ``queue_broker``; see ``lanes.cli.queue.QueueBroker``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from lanes.errors import ConfigError, SourceError
from lanes.queues.partitioned import PartitionedQueue
from lanes.queues.stranded import QueueFacts, partition_number
from lanes.queues.widths import Survey
from lanes_jetstream.cohort.epoch_consumers import EpochName
from lanes_jetstream.cohort.partitioning import divides
from lanes_jetstream.cohort.view import CohortView, read_namespaces
from lanes_jetstream.durable.queue import durable_name
from lanes_jetstream.wire import codes
from lanes_jetstream.wire.answers import read_pages
from lanes_jetstream.wire.connection import Connection
from lanes_jetstream.wire.intake import Intake
from lanes_jetstream.wire.queue_subjects import check_apart, check_queue, subjects_of
from lanes_jetstream.wire.queue_watch import consumer_facts, count_messages, queue_names, reads_only, stores
from lanes_jetstream.wire.stream import check_name, similar_stream
from lanes_jetstream.wire.subjects import overlap

T = TypeVar("T")


class _Cohort(NamedTuple):
    """A cohort of the stream: its view, its stored number of partitions (0 = none), and the leased partitions."""

    view: CohortView
    partitions: int
    leased: frozenset[int]


def queue_broker(queue: PartitionedQueue, server: str, stream: str) -> StreamQueues:
    """Create the client of ``lanes queue`` for JetStream.

    Args:
        queue: The queue, with all its physical queues.
        server: URL of a server.
        stream: Name of the stream.

    Returns:
        The client.

    Raises:
        ConfigError: The URL or a name is invalid.
    """
    return StreamQueues(server, stream, queue)


class StreamQueues:
    """A client that asks a server about a stream's physical queues, and changes the stream's subjects.

    A group is a cohort, or the durables of all partitions. The group has the name of the cohort's namespace, or of the
    durable of partition 0. Other consumers may also deliver messages of a physical queue. For other consumers, the
    survey reports only unfinished messages, because they have no number of partitions.

    Args:
        server: URL of a server.
        stream: Name of the stream.
        queue: The queue, with all its physical queues.

    Raises:
        ConfigError: The URL or a name is invalid.
    """

    noun: Final = "subject"
    what: Final = "the NATS server"

    def __init__(self, server: str, stream: str, queue: PartitionedQueue) -> None:
        check_queue(queue)
        check_name("stream", stream)
        self._connection = Connection(server)
        self._stream = stream
        self._queue = queue.name
        self._numbers = {name: number for number, name in enumerate(queue.names)}
        self._runner = asyncio.Runner()

    def names(self) -> Sequence[str]:
        """Return the beginnings of the subjects that the stream stores.

        Returns:
            The beginnings, each of which may be the name of a physical queue.

        Raises:
            ConfigError: The stream does not exist.
            SourceError: The server does not answer, or refuses the request.
        """
        return self._run(self._names())

    def survey(self, names: Sequence[str], named: Sequence[str] = ()) -> Survey:
        """Ask for the facts of physical queues; see ``lanes.cli.queue.QueueBroker.survey``.

        Args:
            names: Names of the physical queues, beginning with partition 0.
            named: Groups to report for each physical queue, even groups without a consumer. A group without a durable
                has finished no message of this queue. Empty = the groups of the first physical queue.

        Returns:
            The facts.

        Raises:
            ConfigError: The stream does not exist, changes subjects, or stores two physical queues by one subject.
            SourceError: The server does not answer, or refuses a request.
        """
        return self._run(self._survey(names, named))

    def arrived(self, earlier: Survey, later: Survey) -> dict[str, int]:
        """Return the messages that arrived between two surveys, by physical queue; 1 if their number is unknown."""
        return {
            name: max(1, later.facts[name].messages - earlier.facts[name].messages)
            for name, end in earlier.ends.items()
            if later.ends.get(name, 0) > end
        }

    def create(self, names: Mapping[str, int], like: str) -> list[str]:
        """Add the subjects of physical queues to the stream, in the form of an existing queue's subjects. Idempotent.

        Args:
            names: Names of the physical queues.
            like: The existing physical queue.

        Returns:
            A line for each added subject.

        Raises:
            SourceError: The server does not answer, or refuses the change.
        """
        return self._run(self._create(names, like))

    def remove(self, names: Sequence[str]) -> list[str]:
        """Remove the subjects of physical queues from the stream.

        The call keeps finished messages and consumers of these queues.

        Args:
            names: Names of the physical queues.

        Returns:
            A line for each removed subject.

        Raises:
            SourceError: The server does not answer or refuses the change, or a message arrived during the removal. The
                call then adds the subjects of that message again.
        """
        return self._run(self._remove(names))

    def forget(self, groups: Sequence[str], partitions: int) -> list[str]:
        """Delete the stored number of partitions of cohorts without live members, if it differs from the new number.

        Idempotent.

        Args:
            groups: Names of the groups.
            partitions: The new number of partitions.

        Returns:
            A line for each cohort.

        Raises:
            SourceError: The server does not answer, or refuses the deletion.
        """
        return self._run(self._forget(groups, partitions))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._runner.run(self._connection.close())
        self._runner.close()

    # --- in the event loop

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        async def opened() -> T:
            try:
                await self._connection.open()
            except BaseException:
                work.close()
                raise
            with self._connection.api_errors(f"stream {self._stream!r}"):
                return await work

        return self._runner.run(opened())

    async def _info(self) -> dict[str, Any]:
        info = await self._connection.find(f"STREAM.INFO.{self._stream}", codes.STREAM_NOT_FOUND)
        if info is None:
            raise ConfigError(
                f"stream {self._stream!r} does not exist at {self._connection.servers}; create it with the subjects of "
                f"queue {self._queue!r}, or correct --stream{await similar_stream(self._connection, self._stream)}"
            )
        return info

    async def _names(self) -> Sequence[str]:
        intake = Intake.of((await self._info())["config"])
        return queue_names(PartitionedQueue(self._queue), intake.patterns.get(self._stream, ()))

    async def _survey(self, names: Sequence[str], named: Sequence[str] | None) -> Survey:
        """Ask for the facts; see ``survey``.

        With ``named=None``, report a group only for queues where it has a consumer.
        """
        intake = Intake.of((await self._info())["config"])
        check_apart(self._queue, names, self._stream, intake)
        consumers = await read_pages(self._connection.api, f"CONSUMER.LIST.{self._stream}", "consumers")
        cohorts = await self._cohorts()
        groups = {*(named or ()), *(each for each, cohort in cohorts.items() if cohort.partitions)}
        everywhere = () if named is None else named or tuple(self._readers(names[0], consumers, cohorts))
        facts: dict[str, QueueFacts] = {}
        ends: dict[str, int] = {}
        for name in names:
            messages = await count_messages(self._connection, self._stream, name)
            found = QueueFacts(int(stores(intake, name)), messages)
            ends[name] = await self._last(name)
            for group, consumer in self._readers(name, consumers, cohorts).items():
                groups.add(group)
                fact = consumer_facts(consumer, group)
                ends[name] = max(ends[name], int((consumer.get("delivered") or {}).get("stream_seq") or 0))
                found = _merged(found, fact.unfinished, fact.readers)
            number = self._number(name)
            # An owner may have no open pull request, because it has no room.
            found = _merged(found, {}, {each: 1 for each, cohort in cohorts.items() if number in cohort.leased})
            for consumer in consumers:
                left = await self._left(consumer, name, messages)
                if left is not None:
                    found = _merged(found, {str(consumer.get("name")): left}, {})
            # A group without a consumer for this physical queue has finished none of its messages.
            absent = {group: messages for group in everywhere if group not in found.unfinished}
            facts[name] = _merged(found, absent, {}) if found.size else found
        stored = {each: cohort.partitions for each, cohort in cohorts.items() if cohort.partitions}
        return Survey(facts, tuple(sorted(groups)), ends, stored)

    def _number(self, name: str) -> int:
        """Return the partition number in a name, even above the queue's number of partitions; -1 = no number."""
        beyond = partition_number(self._queue, name) if self._queue in self._numbers else -1
        return self._numbers.get(name, beyond)

    def _readers(
        self, name: str, consumers: Sequence[Mapping[str, Any]], cohorts: Mapping[str, _Cohort]
    ) -> dict[str, Mapping[str, Any]]:
        """Return the consumer of each group that delivers only this physical queue."""
        number = self._number(name)
        found: dict[str, Mapping[str, Any]] = {}
        newest: dict[str, EpochName] = {}
        for consumer in consumers:
            own = str(consumer.get("name"))
            parsed = ((each, epoch) for each in cohorts if (epoch := EpochName.parse(each, own)) is not None)
            group, epoch = next(parsed, (own.removesuffix(durable_name("", number)), None))
            if reads_only(consumer, name) and (epoch is None or newest.get(group, epoch) <= epoch):
                found[group] = consumer
                if epoch is not None:
                    newest[group] = epoch
        return found

    async def _left(self, consumer: Mapping[str, Any], name: str, messages: int) -> int | None:
        """Return the number of unfinished messages of a physical queue, for a consumer with further subjects.

        The result is None if the consumer delivers no message of the physical queue, or no other message.
        """
        config = consumer.get("config") or {}
        filters = config.get("filter_subjects") or [config.get("filter_subject") or ">"]
        if reads_only(consumer, name) or not any(overlap(each, own) for each in filters for own in subjects_of(name)):
            return None
        unfinished = consumer_facts(consumer, "").messages
        floor = int((consumer.get("ack_floor") or {}).get("stream_seq") or 0)
        return min(unfinished, messages) if await self._last(name) > floor else 0

    async def _last(self, name: str) -> int:
        """Return the sequence of the last stored message of a physical queue; 0 = no message."""
        last = 0
        for pattern in subjects_of(name):
            answer = await self._connection.find(
                f"STREAM.MSG.GET.{self._stream}", *codes.MESSAGE_NOT_FOUND, request={"last_by_subj": pattern}
            )
            if answer is not None:
                last = max(last, int(answer["message"]["seq"]))
        return last

    async def _cohorts(self) -> dict[str, _Cohort]:
        """Return the cohorts over this queue, and cohorts with deleted settings, by namespace."""
        found = {}
        for namespace in await read_namespaces(self._connection, self._stream):
            view = CohortView(self._connection, self._stream, namespace)
            try:
                config = await view.config()
            except ConfigError:
                # The bucket has no settings, because its members have left. The next member writes the settings.
                found[namespace] = _Cohort(view, 0, frozenset())
                continue
            if config.choice == "queue" and divides(config.detail, self._queue):
                found[namespace] = _Cohort(view, config.partitions, frozenset(await view.leases()))
        return found

    async def _create(self, names: Mapping[str, int], like: str) -> list[str]:
        config = (await self._info())["config"]
        present = list(config.get("subjects") or ())
        forms = [each.removeprefix(like) for each in present if each == like or each.startswith(f"{like}.")]
        wanted = [name + form for name in names for form in forms or ("", ".>")]
        added = [each for each in wanted if each not in present]
        await self._update({**config, "subjects": [*present, *added]})
        return [f"added subject {each!r} to stream {self._stream!r}" for each in added]

    async def _remove(self, names: Sequence[str]) -> list[str]:
        config = (await self._info())["config"]
        present = list(config.get("subjects") or ())
        removed = [each for each in present if any(each == name or each.startswith(f"{name}.") for name in names)]
        await self._update({**config, "subjects": [each for each in present if each not in removed]})
        # The stream no longer stores these subjects, so this count includes each message that arrived after the check.
        late = {
            name: number
            for name, fact in (await self._survey(names, None)).facts.items()
            if (number := max(fact.unfinished.values(), default=fact.messages))
        }
        if late:
            await self._update(config)
            named = ", ".join(f"{number} messages of {name!r}" for name, number in late.items())
            raise SourceError(
                f"stream {self._stream!r}: {named} arrived during the removal, so the command has added the subjects "
                "again. Start all producers with the smaller number, wait until the messages are finished, and run "
                "the command again"
            )
        return [f"removed subject {each!r} from stream {self._stream!r}" for each in removed]

    async def _update(self, config: Mapping[str, Any]) -> None:
        await self._connection.api(f"STREAM.UPDATE.{self._stream}", config)

    async def _forget(self, groups: Sequence[str], partitions: int) -> list[str]:
        return [
            f"cohort {namespace!r} has no live member, and forgot its {cohort.partitions} partition(s)"
            for namespace, cohort in (await self._cohorts()).items()
            if namespace in groups
            and cohort.partitions not in (0, partitions)
            and await cohort.view.forget_partitions()
        ]


def _merged(fact: QueueFacts, unfinished: Mapping[str, int], readers: Mapping[str, int]) -> QueueFacts:
    return fact._replace(unfinished={**fact.unfinished, **unfinished}, readers={**fact.readers, **readers})
