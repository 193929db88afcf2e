// A partitioned queue for Java producers: the names and routes of lanes.PartitionedQueue.
//
// docs/reference/routing.md is the specification. Copy this file into your program, and take BLAKE3 from
// commons-codec 1.16 or newer, as pom.xml does. The program below reads keys in hexadecimal digits, one a line, and
// prints the partition and the physical queue of each key:
//
//     printf 637573746f6d65722d3432 | java -cp classes:commons-codec-1.19.0.jar PartitionedQueue customer-updates 4

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.CharBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.util.HashSet;
import java.util.HexFormat;
import java.util.List;
import java.util.stream.IntStream;
import org.apache.commons.codec.digest.Blake3;

/** One logical queue over a number of physical queues. Immutable, and safe for threads. */
public final class PartitionedQueue {
    public static final int MOST_PARTITIONS = 32_767;

    private static final byte[] CONTEXT =
            "lanes-runtime queue v1: partition of a key".getBytes(StandardCharsets.US_ASCII);

    /** The destination of one message. A message without a key has the key null. */
    public record Route(String name, int partition, byte[] key) {}

    private final List<String> names;

    /** The queue NAME, with the physical queues NAME, NAME__p1, NAME__p2 and so on. */
    public PartitionedQueue(String name, int partitions) {
        if (name.isEmpty()) {
            throw new IllegalArgumentException("the name of a queue must not be empty");
        }
        if (partitions < 1 || partitions > MOST_PARTITIONS) {
            throw new IllegalArgumentException(
                    "partitions=" + partitions + ": use 1 to " + MOST_PARTITIONS + " partitions");
        }
        names = IntStream.range(0, partitions).mapToObj(n -> n == 0 ? name : name + "__p" + n).toList();
    }

    /** A queue over physical queues that have names of their own. */
    public PartitionedQueue(List<String> physicalNames) {
        if (physicalNames.isEmpty() || physicalNames.size() > MOST_PARTITIONS) {
            throw new IllegalArgumentException("a queue has 1 to " + MOST_PARTITIONS + " physical names");
        }
        if (physicalNames.contains("") || new HashSet<>(physicalNames).size() < physicalNames.size()) {
            throw new IllegalArgumentException("physical names must be different, and not empty");
        }
        names = List.copyOf(physicalNames);
    }

    /** The names of the physical queues, in the order of their partitions. */
    public List<String> names() {
        return names;
    }

    public Route routeByKey(byte[] key) {
        int partition = jump(digest(key), names.size());
        return new Route(names.get(partition), partition, key.clone());
    }

    public Route routeByKey(String key) {
        try {
            // getBytes would replace half a surrogate pair by a question mark.
            ByteBuffer encoded = StandardCharsets.UTF_8.newEncoder().encode(CharBuffer.wrap(key));
            byte[] bytes = new byte[encoded.remaining()];
            encoded.get(bytes);
            return routeByKey(bytes);
        } catch (CharacterCodingException error) {
            throw new IllegalArgumentException("the key has no UTF-8: pass its bytes", error);
        }
    }

    /** The route of message number i, counted from 0, if the message has no key. */
    public Route routeByIndex(long i) {
        if (i < 0) {
            throw new IllegalArgumentException("the index " + i + " is negative; count the messages from 0");
        }
        int partition = (int) (i % names.size());
        return new Route(names.get(partition), partition, null);
    }

    /** Step 1 of the specification: 64 bits, unsigned. */
    static long digest(byte[] key) {
        byte[] first = Blake3.initKeyDerivationFunction(CONTEXT).update(key).doFinalize(8);
        return ByteBuffer.wrap(first).order(ByteOrder.LITTLE_ENDIAN).getLong();
    }

    /** Step 2 of the specification: jump consistent hash. The order of division and multiplication matters. */
    static int jump(long digest, int partitions) {
        long partition = 0;
        long next = 0;
        while (next < partitions) {
            partition = next;
            digest = digest * 2_862_933_555_777_941_757L + 1;
            next = (long) ((partition + 1) * (0x1p31 / ((digest >>> 33) + 1)));
        }
        return (int) partition;
    }

    public static void main(String[] arguments) throws IOException {
        PartitionedQueue queue = new PartitionedQueue(arguments[0], Integer.parseInt(arguments[1]));
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        PrintStream out = new PrintStream(System.out, false, StandardCharsets.UTF_8);
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            Route route = queue.routeByKey(HexFormat.of().parseHex(line));
            out.println(route.partition() + " " + route.name());
        }
        out.flush();
    }
}
