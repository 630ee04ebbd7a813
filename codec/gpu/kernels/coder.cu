// rANS by a warp. A row is a sequence of numbers that is coded in 1 to 32 streams; a thread has one stream of one row,
// and all threads take a step at the same time. Words are written from their end, and read from their beginning.

struct Streams {  // of a thread
    u32 first;                    // first lane of the thread's row
    int stream, together, row;    // index of the stream in its row; number of rows in a warp; index of the row
    u32 group, before;            // lanes of the thread's row; those of them before the thread

    __device__ __forceinline__ Streams(int streams) {
        const int lane = threadIdx.x % 32;
        stream = lane % streams, row = lane / streams, together = 32 / streams;
        first = lane - stream;
        pin(first);
        group = (streams == 32 ? FULL : (1u << streams) - 1) << first;
        before = group & ((1u << lane) - 1);
    }
};

// Each thread puts a symbol into its stream. entry: the symbol's frequency (12 bits), and the sum of the frequencies of
// the symbols before it (12). inverse: 2**32 divided by the frequency. at: index of the row's first word so far; below 0
// if the words do not fit.
__device__ __forceinline__ void put_symbol(u32& x, int& at, u16* words, u32 entry, u32 inverse, const Streams& me) {
    const u32 often = entry & 4095, sum = entry >> 12 & 4095;
    const bool full = x >> 20 >= often;
    const u32 fulls = __ballot_sync(FULL, full);
    at -= __popc(fulls & me.group);
    if (full && at >= 0) words[at + __popc(fulls & me.before)] = x;
    if (full) x >>= 16;
    u32 whole = __umulhi(x, inverse);
    if (x - whole * often >= often) whole++;
    x += whole * (4096 - often) + sum;
}

// As `put_symbol`, but threads that are not `on` put nothing. With ESCAPES, an entry with the highest bit is an escape,
// behind which `value` is put as a word.
template <bool ESCAPES>
__device__ __forceinline__ void put_any(u32& x, int& at, u16* words, u32 entry, u32 inverse, int value, bool on,
                                        const Streams& me) {
    const u32 often = entry & 4095, sum = entry >> 12 & 4095;
    const bool full = on && x >> 20 >= often, escaped = ESCAPES && on && entry >> 31;
    const u32 fulls = __ballot_sync(FULL, full), escapes = ESCAPES ? __ballot_sync(FULL, escaped) : 0;
    const int before = __popc(fulls & me.before) + __popc(escapes & me.before);
    at -= __popc(fulls & me.group) + __popc(escapes & me.group);
    if (escaped && at >= 0) words[at + before + full] = value;
    if (full && at >= 0) words[at + before] = x;
    if (full) x >>= 16;
    u32 whole = __umulhi(x, inverse);
    if (x - whole * often >= often) whole++;
    if (on) x += whole * (4096 - often) + sum;
}

struct Reader {  // of a row's words. A row without words still has a word that can be read, of any value.
    const u16* words;
    u32 size, at;

    __device__ __forceinline__ u32 word(u32 i) const { return words[min(i, max(size, 1u) - 1)]; }
    __device__ __forceinline__ void prefetch(const Streams& me, int streams) const {
        for (u32 i = 64 * me.stream; i < size; i += 64 * streams) asm volatile("prefetch.global.L2 [%0];" ::"l"(words + i));
    }
};

// Finish a symbol: refill states, and return the word behind an escape. next: the stream's state after the symbol, to
// which a word is added if it is too low. Every thread reads a word, even if it needs none, so that none waits.
__device__ __forceinline__ u32 take_words(u32& x, u32 next, Reader& reader, bool escaped, bool on, const Streams& me) {
    const bool low = on && next < LOWEST;
    const u32 lows = __ballot_sync(FULL, low), escapes = __ballot_sync(FULL, escaped);
    u32 mine = reader.at + __popc(lows & me.before), taken = __popc(lows & me.group), raw = 0;
    if (escapes) {
        __syncwarp();  // so that it is a branch: it is rarely taken, and long
        mine += __popc(escapes & me.before), taken += __popc(escapes & me.group);
        raw = reader.word(mine + low);
    }
    const u32 word = reader.word(mine);
    x = low ? next << 16 | word : on ? next : x;
    reader.at += taken;
    return raw;
}
