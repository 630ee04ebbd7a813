// rANS coder of codec wht: rows of whole numbers to 16-bit words, equal to those of manthan.codec.cpu.rans, and back. A row
// is one KV block's keys or values of a layer; each of its runs (one head's part) has a table of frequencies. A thread has
// one of a row's rANS streams. Rows of fewer than 32 streams share a warp: the same row of consecutive KV blocks.
//
// job.encoding: [TABLES, 256 symbols] of two u32. The first has the symbol's frequency (bits 0 to 11), the sum of earlier
// symbols' frequencies (12 to 23), and bit 31. Bit 31 is set for the escape and for symbols that the table lacks, which
// have the escape's numbers. The second is 2**32 divided by the frequency.
// job.decoding: [TABLES, SLOTS] u8, the symbol of each slot; then [TABLES, 256 symbols] u32, the sum of earlier symbols'
// frequencies, and the frequency from bit 16 on. It is in shared memory if it fits (SHARED_TABLES).

#define ESCAPE 255
#define SYMBOL_MAX 127
#define SLOTS 4096
#define ENCODE_THREADS 512
#define DECODE_THREADS 1024
#define ENCODING_UNITS (TABLES * 256 * 8 / 16)
#define DECODING_UNITS (TABLES * (SLOTS + 256 * 4) / 16)

struct Octets {  // a batch: eight numbers a stream. first: its lowest index; head: run of `first`; begin: the run's lowest index
    u32 all, numbers, of_run, first, head, begin;

    __device__ __forceinline__ Octets(const Sections& job, u32 batch)
        : all(8 * job.streams), numbers(job.heads * HEAD_DIM * job.tokens), of_run(HEAD_DIM * job.tokens) {
        first = batch * all, head = first / of_run, begin = head * of_run;
    }
    __device__ __forceinline__ void forth() {
        for (first += all; first >= begin + of_run; begin += of_run) head++;
    }
    __device__ __forceinline__ void back() {
        for (first -= all; (int)first >= 0 && first < begin; begin -= of_run) head--;
    }
    // True if all numbers of the batch are of one run.
    __device__ __forceinline__ bool alike() const { return first + all <= begin + of_run; }
};

__device__ __forceinline__ uint2 entry_of(const uint2* table, int value) {
    return table[(u32)(value + SYMBOL_MAX) <= 2 * SYMBOL_MAX ? value + SYMBOL_MAX : ESCAPE];
}

// Encode the rows in `rounded`. `far` becomes 1 if the words of a row do not fit into its room.
extern "C" __global__ void __launch_bounds__(ENCODE_THREADS, 2) encode_words(const Wht job) {
    extern __shared__ uint4 shared[];
    for (int i = threadIdx.x; i < ENCODING_UNITS; i += ENCODE_THREADS) shared[i] = job.encoding[i];
    __syncthreads();
    const uint2* tables = (const uint2*)shared;
    const Streams me(job.streams);
    const u32 together = (job.n + me.together - 1) / me.together, warps = ENCODE_THREADS / 32;
    const int batches = job.row_room / (8 * job.streams);
    for (u32 run = threadIdx.x / 32 * gridDim.x + blockIdx.x; run < KINDS * job.layers * together; run += gridDim.x * warps) {
        const int row = run / together, block = run % together * me.together + me.row, kind = row >= job.layers;
        const int safe = min(block, job.n - 1), layer = row - kind * job.layers;
        const i64 place = (i64)row * job.n + safe;
        const uint4* from = (const uint4*)(job.rounded + place * job.row_room) + me.stream;
        const u8* chosen = job.fronts + (2 * safe + kind) * job.fronts_nbytes + job.tables_at[kind] + layer * job.heads;
        u16* words = job.words + place * job.room;
        int at = block < job.n ? job.room : -1;
        u32 x = LOWEST, head = FULL;
        const uint2* table = tables;
        Octets octets(job, batches - 1);
        uint4 ahead = from[(batches - 1) * job.streams];
        for (int batch = batches - 1; batch >= 0; batch--, octets.back()) {
            const uint4 now = ahead;
            const u32 four[4] = {now.x, now.y, now.z, now.w};
            if (batch) ahead = from[(batch - 1) * job.streams];
            if (octets.alike()) {
                if (octets.head != head) head = octets.head, table = tables + 256 * chosen[head];
                uint2 entries[8];
                u32 any = 0;
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    entries[k] = entry_of(table, (short)(four[k / 2] >> 16 * (k % 2)));
                    any |= entries[k].x;
                }
                if (__any_sync(FULL, any >> 31)) {
#pragma unroll 1
                    for (int k = 7; k >= 0; k--) {
                        const u32 two = k >= 4 ? k >= 6 ? four[3] : four[2] : k >= 2 ? four[1] : four[0];
                        const int value = (short)(two >> 16 * (k % 2));
                        const uint2 entry = entry_of(table, value);
                        put_any<true>(x, at, words, entry.x, entry.y, value, true, me);
                    }
                } else {
#pragma unroll
                    for (int k = 7; k >= 0; k--) put_symbol(x, at, words, entries[k].x, entries[k].y, me);
                }
            } else {
                head = FULL;
#pragma unroll 1
                for (int k = 7; k >= 0; k--) {
                    const u32 i = octets.first + k * job.streams + me.stream;
                    table = tables + 256 * chosen[min(i, octets.numbers - 1) / octets.of_run];
                    const u32 two = k >= 4 ? k >= 6 ? four[3] : four[2] : k >= 2 ? four[1] : four[0];
                    const int value = (short)(two >> 16 * (k % 2));
                    const uint2 entry = entry_of(table, value);
                    put_any<true>(x, at, words, entry.x, entry.y, value, i < octets.numbers, me);
                }
            }
        }
        if (block >= job.n) continue;
        const i64 kept = (i64)block * KINDS * job.layers + row;
        job.states[kept * job.streams + me.stream] = x;
        if (me.stream == 0) job.sizes[kept] = job.room - at;
        if (at < 0) job.far[2 * block + kind] = 1;
    }
}

// Encode a row of one KV block, with quantization steps doubled `doublings` times, by the warp's first job.streams threads.
__device__ __forceinline__ void encode_doubled(const Wht& job, int row, int block, int doublings, const Streams& me) {
    const uint2* tables = (const uint2*)job.encoding;
    const int kind = row >= job.layers, layer = row - kind * job.layers;
    const i64 place = (i64)row * job.n + block;
    const uint4* from = (const uint4*)(job.rounded + place * job.row_room) + me.stream;
    const u8* chosen = job.fronts + (2 * block + kind) * job.fronts_nbytes + job.tables_at[kind] + layer * job.heads;
    const u32 numbers = job.heads * HEAD_DIM * job.tokens, of_run = HEAD_DIM * job.tokens;
    u16* words = job.words + place * job.room;
    int at = me.row ? -1 : job.room;
    u32 x = LOWEST;
    for (int batch = job.row_room / (8 * job.streams) - 1; batch >= 0; batch--) {
        const uint4 now = from[batch * job.streams];
#pragma unroll 1
        for (int k = 7; k >= 0; k--) {
            const u32 i = (8 * batch + k) * job.streams + me.stream;
            const int table = max((int)chosen[min(i, numbers - 1) / of_run] - OCTAVE * doublings, 0);
            const u32 two = k >= 4 ? k >= 6 ? now.w : now.z : k >= 2 ? now.y : now.x;
            const int value = halved((short)(two >> 16 * (k % 2)), doublings);
            const uint2 entry = entry_of(tables + 256 * table, value);
            put_any<true>(x, at, words, entry.x, entry.y, value, !me.row && i < numbers, me);
        }
    }
    if (me.row) return;
    const i64 kept = (i64)block * KINDS * job.layers + row;
    job.states[kept * job.streams + me.stream] = x;
    if (me.stream == 0) job.sizes[kept] = job.room - at;
    if (at < 0) job.far[2 * block + kind] = 1;
}

// Double a section's (a KV block's keys or values) steps until it fits. Most fit already. A thread block takes a section.
extern "C" __global__ void __launch_bounds__(ENCODE_THREADS) double_steps(const Wht job) {
    const Streams me(job.streams);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = ENCODE_THREADS / 32;
    for (u32 section = blockIdx.x; section < (u32)(KINDS * job.n); section += gridDim.x) {
        const int block = section / KINDS, kind = section % KINDS;
        int doublings = 0;
        while (doublings < MOST_DOUBLINGS && !fits(job, block, kind, lane)) {
            doublings++;
            __syncthreads();
            if (threadIdx.x == 0) job.far[2 * block + kind] = 0;
            __syncthreads();
            for (int layer = warp; layer < job.layers; layer += warps)
                encode_doubled(job, kind * job.layers + layer, block, doublings, me);
            __syncthreads();
        }
        if (threadIdx.x == 0) job.doublings[2 * block + kind] = doublings;
    }
}

// Decode the next number of a thread's stream. Return it plus 127, modulo 2**16.
__device__ __forceinline__ u32 decode_whole(u32& x, Reader& reader, const u8* slots, const u32* entries, bool on,
                                            const Streams& me) {
    const u32 slot = x & (SLOTS - 1), symbol = slots[slot], entry = entries[symbol];
    const u32 next = (entry >> 16) * (x >> 12) + slot - (entry & 0xffff);
    const bool escaped = on && symbol == ESCAPE;
    const u32 raw = take_words(x, next, reader, escaped, on, me);
    return escaped ? raw + SYMBOL_MAX & 0xffff : symbol;
}

// Decode good blocks' rows into `rounded`, plus SYMBOL_MAX. A status becomes 0 for states and words that no encoder writes.
extern "C" __global__ void __launch_bounds__(DECODE_THREADS, 1) decode_words(const Wht job) {
#if SHARED_TABLES
    extern __shared__ uint4 shared[];
    for (int i = threadIdx.x; i < DECODING_UNITS; i += DECODE_THREADS) shared[i] = job.decoding[i];
    __syncthreads();
    const u8* slots = (const u8*)shared;
#else
    const u8* slots = (const u8*)job.decoding;
#endif
    const u32* entries = (const u32*)(slots + TABLES * SLOTS);
    const Streams me(job.streams);
    const u32 together = (job.n + me.together - 1) / me.together, warps = DECODE_THREADS / 32;
    const int batches = job.row_room / (8 * job.streams);
    for (u32 run = threadIdx.x / 32 * gridDim.x + blockIdx.x; run < KINDS * job.layers * together; run += gridDim.x * warps) {
        const int row = run / together, block = run % together * me.together + me.row, kind = row >= job.layers;
        const bool there = block < job.n && job.status[block] == GOOD;
        if (!__any_sync(FULL, there)) continue;
        const int safe = min(block, job.n - 1), layer = row - kind * job.layers;
        Reader reader{(const u16*)job.buffer, 0, 0};
        u32 x = LOWEST, head = FULL, table = 0;
        int narrower = 0;
        const u8* chosen = 0;
        if (there) {
            const u8* section = job.buffer + job.offsets[block] + job.starts[2 * block + kind];
            const i64 place = (i64)block * KINDS * job.layers + row;
            reader.size = job.sizes[place];
            narrower = OCTAVE * job.doublings[2 * block + kind];
            if (reader.size) reader.words = (const u16*)(section + front_nbytes(job, kind)) + job.firsts[place];
            chosen = section + START_NBYTES + job.tables_at[kind] + layer * job.heads;
            const u16* state = (const u16*)(section + rows_at(job, kind) + sizes_nbytes(job));
            state += 2 * ((i64)layer * job.streams + me.stream);
            x = state[0] | (u32)state[1] << 16;
            reader.prefetch(me, job.streams);
        }
        bool good = x >= LOWEST;
        uint4* to = (uint4*)(job.rounded + ((i64)row * job.n + safe) * job.row_room) + me.stream;
        Octets octets(job, 0);
        for (int batch = 0; batch < batches; batch++, octets.forth()) {
            u32 found[8];
            if (octets.alike()) {
                if (octets.head != head) head = octets.head, table = there ? max((int)chosen[head] - narrower, 0) : 0;
                const u8* own_slots = slots + SLOTS * table;
                const u32* own_entries = entries + 256 * table;
#pragma unroll
                for (int k = 0; k < 8; k++) found[k] = decode_whole(x, reader, own_slots, own_entries, true, me);
            } else {
                head = FULL;
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    const u32 i = octets.first + k * job.streams + me.stream;
                    table = there ? max((int)chosen[min(i, octets.numbers - 1) / octets.of_run] - narrower, 0) : 0;
                    const bool on = i < octets.numbers;
                    found[k] = decode_whole(x, reader, slots + SLOTS * table, entries + 256 * table, on, me);
                }
            }
            if (there)
                to[batch * job.streams] = make_uint4(found[0] | found[1] << 16, found[2] | found[3] << 16,
                                                     found[4] | found[5] << 16, found[6] | found[7] << 16);
        }
        good = good && reader.at == reader.size && x == LOWEST;
        if (there && !good) job.status[block] = 0;
    }
}
