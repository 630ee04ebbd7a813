// Entropy-coded sections: what the kernels of codecs wht and klt share.

struct Lossy : Blocks {   // sections of lossy tokens
    const float* turns;   // [n, 2, block_tokens, PAIRS] cosines, then sines
    i64 start, kept_at;   // start: offset of the first lossy section in an encoded block; kept_at: of latents' scales
    int first_token, block_tokens;
    int kept_stride;      // bytes from a token's scales to the next token's
    float rope_scale;
};

#define START_NBYTES 4
#define LOWEST 65536u
#define ENTRY_AT(entry) (128 + 64 * (entry) + 24)  // offset of a section's length in the header
#define NBYTES_AT 32                               // offset of the base's length in the header

__device__ __forceinline__ i64 align16(i64 nbytes) { return (nbytes + 15) & ~(i64)15; }
__device__ __forceinline__ const float* cosines_of(const Lossy& job, int block) {
    return job.turns + ((i64)block * 2 * job.block_tokens + job.first_token) * PAIRS;
}

// Scale of a latent's piece, from the exact bytes of the encoded block (manthan.codec.block.Scales); 1 without scales.
__device__ __forceinline__ float scale_of(const Lossy& job, int block, int layer, int piece, int t) {
#if SCALES
    const u8* at = job.buffer + job.offsets[block] + job.kept_at + piece * SCALES;
    at += ((i64)layer * job.block_tokens + job.first_token + t) * job.kept_stride;
    const float scale = SCALES == 4 ? *(const float*)at : f((u32)*at << 23);
    return scale > 0.f ? scale : 1.f;
#else
    return 1.f;
#endif
}

// Copy words. Stores are aligned pairs of words; a pair is loaded as two words if the source is not aligned.
__device__ __forceinline__ void copy_words(u16* to, const u16* from, u32 size, int lane) {
    const u32 lead = min((u32)((u64)to / 2 % 2), size), pairs = (size - lead) / 2;
    if (lane < lead) to[0] = from[0];
    to += lead, from += lead;
    const bool apart = (u64)from / 2 % 2;
#pragma unroll 4
    for (u32 i = lane; i < pairs; i += 32)
        ((u32*)to)[i] = apart ? from[2 * i] | (u32)from[2 * i + 1] << 16 : ((const u32*)from)[i];
    if (lane == 0 && (size - lead) % 2) to[2 * pairs] = from[2 * pairs];
}

// rANS by a warp. A row is a sequence of numbers, coded in 1 to 32 rANS streams (a power of 2). A thread has a stream
// of a row, and all threads take a step at the same time. Words are written last to first, and read first to last.

struct Streams {  // position of a thread among the streams of a warp
    u32 first;                    // first lane of the thread's row
    int stream, together, row;    // index of the stream in the row; rows in a warp; index of the row in the warp
    u32 group, before;            // masks: lanes of the thread's row, and of these the lanes before the thread

    __device__ __forceinline__ Streams(int streams) {
        const int lane = threadIdx.x % 32;
        stream = lane % streams, row = lane / streams, together = 32 / streams;
        first = lane - stream;
        pin(first);
        group = (streams == 32 ? FULL : (1u << streams) - 1) << first;
        before = group & ((1u << lane) - 1);
    }
};

// Each thread puts a symbol into its stream. entry: the symbol's frequency (bits 0 to 11), and the sum of earlier
// symbols' frequencies (bits 12 to 23). inverse: 2**32 divided by the frequency. at: index of the row's first word so
// far; below 0 if the words do not fit.
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

// As `put_symbol`, but threads that are not `on` put nothing. With ESCAPES, an entry with bit 31 set is an escape,
// which `value` follows as a word.
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

struct Reader {  // of a row's words. Even for a row without words, `words` points to readable memory.
    const u16* words;
    u32 size, at;

    __device__ __forceinline__ u32 word(u32 i) const { return words[min(i, max(size, 1u) - 1)]; }
    __device__ __forceinline__ void prefetch(const Streams& me, int streams) const {
        for (u32 i = 64 * me.stream; i < size; i += 64 * streams) asm volatile("prefetch.global.L2 [%0];" ::"l"(words + i));
    }
};

// Finish a symbol: refill states, and return the word behind an escape. next: the stream's state after the symbol, to
// which a word is appended if it is below LOWEST. Every thread loads a word, needed or not, so that none branches.
__device__ __forceinline__ u32 take_words(u32& x, u32 next, Reader& reader, bool escaped, bool on, const Streams& me) {
    const bool low = on && next < LOWEST;
    const u32 lows = __ballot_sync(FULL, low), escapes = __ballot_sync(FULL, escaped);
    u32 mine = reader.at + __popc(lows & me.before), taken = __popc(lows & me.group), raw = 0;
    if (escapes) {
        __syncwarp();  // makes the compiler branch, because this is rare and long
        mine += __popc(escapes & me.before), taken += __popc(escapes & me.group);
        raw = reader.word(mine + low);
    }
    const u32 word = reader.word(mine);
    x = low ? next << 16 | word : on ? next : x;
    reader.at += taken;
    return raw;
}
