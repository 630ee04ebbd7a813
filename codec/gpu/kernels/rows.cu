// Rows of small integers to words and back: manthan.codec.cpu.rans, whose words these are. A warp takes as many rows of
// one layer, of blocks next to each other in the batch, as their streams fill it.
//
// numbers has for each row its integers in the order of their streams, the rows of all blocks next to each other.
//
// Tables for encoding: a u32 for each of 256 symbols, frequency (12 bits), sum of those before it (12) and, where it is
// not in the table and these are the escape's, the highest bit; behind all tables, by frequency, the reciprocal of 2**32.
// For decoding: of each 16 slots, u16 [256], where the ranks of their symbols are, in 16 bytes; by rank, u32, frequency,
// sum, symbol (8 bits). Ranks are behind all tables, at `pool`: tables have many in common.

#define ESCAPE 255
#define SYMBOL_MAX 127
#define FURTHEST 32767.f
#define ROW_THREADS 1024
#define BATCH 8
#define ROW_WARPS (ROW_THREADS / 32)

// -127 to 127, exactly: 1024 and the symbol, less 1024 and 127.
__device__ __forceinline__ Half of_symbol(u32 symbol) {
    Half number;
    asm("sub.rn.f16 %0, %1, %2;" : "=h"(number) : "h"((Half)(0x6400 + symbol)), "h"((Half)(0x6400 + SYMBOL_MAX)));
    return number;
}

// In shared memory, where they fit.
__device__ __forceinline__ const u8* fetch_tables(const Sections& job) {
#if SHARED_TABLES
    extern __shared__ uint4 shared[];
    for (int i = threadIdx.x; i < job.tables_nbytes / 16; i += ROW_THREADS) shared[i] = ((const uint4*)job.tables)[i];
    __syncthreads();
    return (const u8*)shared;
#else
    return job.tables;
#endif
}

struct Step {  // the numbers of all rows that are next: this lane's component, token, and place among numbers
    int component, token;
    u32 at;

    __device__ __forceinline__ Step(const Sections& job, int row, int block, int number) {
        component = number / job.tokens, token = number % job.tokens;
        at = (u32)(row * components(job) + component) * job.width + block * job.tokens + token;
    }
};

struct Stride {  // from one step to the next
    int components, tokens, all;
    u32 width;

    __device__ __forceinline__ Stride(const Sections& job)
        : components(job.streams / job.tokens), tokens(job.streams % job.tokens), all(job.tokens), width(job.width) {}
    __device__ __forceinline__ void forth(Step& step) const {
        step.component += components, step.token += tokens, step.at += components * width + tokens;
        if (step.token >= all) step.component++, step.token -= all, step.at += width - all;
    }
    __device__ __forceinline__ void back(Step& step) const {
        step.component -= components, step.token -= tokens, step.at -= components * width + tokens;
        if (step.token < 0) step.component--, step.token += all, step.at -= width - all;
    }
};

struct Numbers {  // that are encoded next
    Half number[BATCH];
    int table[BATCH];  // where its table is, in 16 bytes; -1: there is no number

    // share: of a step, 1 over how much larger steps are made.
    __device__ __forceinline__ void fetch(const Sections& job, const Stride& stride, const u32* table_of, Step& step,
                                          float share) {
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            bool on = (u32)step.component < (u32)components(job);
            number[i] = on ? job.numbers[step.at] : 0;
            if (share != 1.f) number[i] = narrow(rintf(wide(number[i])) * share);
            table[i] = on ? table_of[step.component] : -1;
            stride.back(step);
        }
    }
};

// The same of rows of whose components each takes PARTS steps: all threads of a warp are at the same component.
template <int PARTS>
struct EvenNumbers {
    Half number[BATCH];
    u32 table[BATCH / PARTS];

    __device__ __forceinline__ u32 table_of(int i) const { return table[i / PARTS]; }
    __device__ __forceinline__ void fetch(const Sections& job, const u32*& tables, u32& at) {
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            number[i] = job.numbers[at - i / PARTS * job.width - i % PARTS * job.streams];
#pragma unroll
        for (int i = 0; i < BATCH / PARTS; i++) table[i] = *(tables - i);
        tables -= BATCH / PARTS, at -= BATCH / PARTS * job.width;
    }
};

struct Row {  // that is encoded, of one stream
    u16* words;
    int at;
    u32 x;
    bool lost;  // a number is no int16
};

// To the nearest, ties to even, and 127 more: above 254 it needs an escape.
__device__ __forceinline__ u32 whole_number(Half number) {
    return b(__fadd_rn(wide(number), 12582912.f)) - (0x4b400000u - SYMBOL_MAX);
}

struct Entries {  // in the tables
    const u8* tables;
    const u32* reciprocals;

    __device__ __forceinline__ u32 of(u32 table, u32 whole) const {
        return *(const u32*)(tables + 16 * table + 4 * min(whole, (u32)ESCAPE));
    }
    __device__ __forceinline__ u32 inverse(u32 entry) const { return reciprocals[entry & 4095]; }
};

__device__ __forceinline__ void put_number(Row& row, Half number, u32 table, bool on, const Entries& entries,
                                           const Streams& me) {
    const u32 whole = whole_number(number), entry = entries.of(table, whole);
    row.lost = row.lost || on && !(fabsf(wide(number)) <= FURTHEST);
    put_any<true>(row.x, row.at, row.words, entry, entries.inverse(entry), (int)whole - SYMBOL_MAX, on, me);
}

// All numbers of rows, from the last to the first.
template <int PARTS>
__device__ __forceinline__ void put_evenly(const Sections& job, Row& row, const Step& last, const u32* tables, int steps,
                                           const Entries& entries, const Streams& me) {
    u32 at = last.at;
    tables += last.component;
    EvenNumbers<PARTS> ahead;
    ahead.fetch(job, tables, at);
    for (int left = steps; left > 0; left -= BATCH) {
        const EvenNumbers<PARTS> now = ahead;
        if (left > BATCH) ahead.fetch(job, tables, at);
        u32 found[BATCH], any = 0;
#pragma unroll
        for (int i = 0; i < BATCH; i++) any |= found[i] = entries.of(now.table_of(i), whole_number(now.number[i]));
        if (__any_sync(FULL, any >> 31)) {
#pragma unroll 1
            for (int i = 0; i < BATCH; i++) {
                Half number = now.number[0];
                u32 table = now.table_of(0);
#pragma unroll
                for (int k = 1; k < BATCH; k++)
                    if (k == i) number = now.number[k], table = now.table_of(k);
                put_number(row, number, table, true, entries, me);
            }
        } else {
            u32 inverse[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) inverse[i] = entries.inverse(found[i]);
#pragma unroll
            for (int i = 0; i < BATCH; i++) put_symbol(row.x, row.at, row.words, found[i], inverse[i], me);
        }
    }
}

__device__ __forceinline__ void put_any_way(const Sections& job, Row& row, Step step, const u32* table_of, int steps,
                                            const Entries& entries, const Streams& me, float share = 1.f) {
    const Stride stride(job);
    Numbers ahead;
    ahead.fetch(job, stride, table_of, step, share);
    for (int left = steps; left > 0; left -= BATCH) {
        const Numbers now = ahead;
        if (left > BATCH) ahead.fetch(job, stride, table_of, step, share);
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            put_number(row, now.number[i], max(now.table[i], 0), now.table[i] >= 0, entries, me);
    }
}

// numbers: rounded here. far becomes 1 where a row's words do not fit into their room. A status becomes the first vector
// of a layer one number of which is no int16.
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1) encode_rows(const Sections job) {
    const u8* tables = fetch_tables(job);
    const Entries entries{tables, (const u32*)(tables + job.tables_nbytes - 4 * 4096)};
    const Streams me(job.streams);
    const int steps = (components(job) * job.tokens + job.streams - 1) / job.streams;
    const u32 together = (job.n + me.together - 1) / me.together;
    const int parts = job.tokens % job.streams == 0 ? job.tokens / job.streams : 0;
    for (u32 run = SPREAD_WARP; run < KINDS * job.layers * together; run += gridDim.x * ROW_WARPS) {
        const int row = run / together, block = run % together * me.together + me.row, safe = min(block, job.n - 1);
        const bool there = block < job.n;
        const u32* table_of = job.table_of + (i64)row * components(job);
        Row out{job.words + (i64)(row * job.n + safe) * job.room, there ? (int)job.room : -1, LOWEST, false};
        Step step(job, row, safe, (steps - 1) * job.streams + me.stream);
        if (parts == 1) {
            put_evenly<1>(job, out, step, table_of, steps, entries, me);
        } else if (parts == 4) {
            put_evenly<4>(job, out, step, table_of, steps, entries, me);
        } else {
            if (!there) step.component = -1;
            put_any_way(job, out, step, table_of, steps, entries, me);
        }
        if (!there) continue;
        i64 place = (i64)block * KINDS * job.layers + row;
        job.states[place * job.streams + me.stream] = out.x;
        if (me.stream == 0) job.sizes[place] = job.room - out.at;
        const int kind = row >= job.layers;
        if (out.at < 0) job.far[2 * block + kind] = 1;
        if (out.lost) atomicMin(job.status + block, (row - kind * job.layers) * job.heads * job.tokens);
    }
}

// Sections that do not fit double their steps until they do, each by a block of threads. It is rare.
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1) double_steps(const Sections job) {
    const Entries entries{job.tables, (const u32*)(job.tables + job.tables_nbytes - 4 * 4096)};
    const Streams me(job.streams);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int steps = (components(job) * job.tokens + job.streams - 1) / job.streams;
    for (u32 section = blockIdx.x; section < (u32)(KINDS * job.n); section += gridDim.x) {
        const int block = section / KINDS, kind = section % KINDS;
        int doublings = 0;
        while (doublings < MOST_DOUBLINGS && !fits(job, block, kind, lane)) {
            doublings++;
            __syncthreads();
            if (threadIdx.x == 0) job.far[2 * block + kind] = 0;
            __syncthreads();
            for (int layer = warp; layer < job.layers; layer += ROW_WARPS) {
                const int row = kind * job.layers + layer;
                Row out{job.words + (i64)(row * job.n + block) * job.room, me.row ? -1 : (int)job.room, LOWEST, false};
                Step step(job, row, block, (steps - 1) * job.streams + me.stream);
                if (me.row) step.component = -1;
                put_any_way(job, out, step, job.table_of + (i64)row * components(job), steps, entries, me,
                            f((127u - doublings) << 23));
                if (me.row) continue;
                const i64 place = (i64)block * KINDS * job.layers + row;
                job.states[place * job.streams + me.stream] = out.x;
                if (me.stream == 0) job.sizes[place] = job.room - out.at;
                if (out.at < 0) job.far[2 * block + kind] = 1;
            }
            __syncthreads();
        }
        if (threadIdx.x == 0) job.doublings[2 * block + kind] = doublings;
    }
}

struct Slots {  // of the tables
    const u8 *tables, *pool;

    // The entry of a state's slot in one table.
    __device__ __forceinline__ u32 entry(u32 table, u32 x) const {
        const u8* from = tables + 16 * table;
        const u32 slot = x & 4095, rank = pool[16 * *(const u16*)(from + 2 * (slot / 16)) + slot % 16];
        return *(const u32*)(from + 512 + 4 * rank);
    }
};

// The next number of each stream.
__device__ __forceinline__ Half get_number(u32& x, Reader& reader, u32 table, bool on, const Slots& slots,
                                           const Streams& me) {
    const u32 entry = slots.entry(table, x), symbol = entry >> 24;
    const u32 next = (entry & 4095) * (x >> 12) + (x & 4095) - (entry >> 12 & 4095);
    const bool escaped = on && symbol == ESCAPE;
    const u32 raw = take_words(x, next, reader, escaped, on, me);
    return escaped ? narrow((short)raw) : of_symbol(symbol);
}

// All numbers of rows, where threads of a warp are at the same component; those of rows that are not `there` are not written.
template <int PARTS>
__device__ __forceinline__ void get_evenly(const Sections& job, u32& x, Reader& reader, const Step& first,
                                           const u32* tables, int steps, bool there, const Slots& slots,
                                           const Streams& me) {
    u32 at = first.at, ahead[BATCH / PARTS];
#pragma unroll
    for (int i = 0; i < BATCH / PARTS; i++) ahead[i] = tables[i];
    for (int left = steps; left > 0; left -= BATCH, at += BATCH / PARTS * job.width) {
        u32 table[BATCH / PARTS];
        tables += BATCH / PARTS;
#pragma unroll
        for (int i = 0; i < BATCH / PARTS; i++) {
            table[i] = ahead[i];
            if (left > BATCH) ahead[i] = tables[i];
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const Half number = get_number(x, reader, table[i / PARTS], true, slots, me);
            if (there) job.numbers[at + i / PARTS * job.width + i % PARTS * job.streams] = number;
        }
    }
}

__device__ __forceinline__ void get_any_way(const Sections& job, u32& x, Reader& reader, Step step, const u32* table_of,
                                            int steps, bool there, const Slots& slots, const Streams& me) {
    const Stride stride(job);
    const u32 last = components(job) - 1;
    u32 ahead = table_of[min((u32)step.component, last)];
    for (int left = steps; left > 0; left--) {
        const u32 table = ahead, at = step.at;
        const bool on = step.component <= last;
        stride.forth(step);
        ahead = table_of[min((u32)step.component, last)];
        const Half number = get_number(x, reader, table, on, slots, me);
        if (on && there) job.numbers[at] = number;
    }
}

// Of good blocks. A status becomes 0 for words that no encoder writes.
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1) decode_rows(const Sections job) {
    const u8* tables = fetch_tables(job);
    const Slots slots{tables, tables + job.pool};
    const Streams me(job.streams);
    const int all = components(job), steps = (all * job.tokens + job.streams - 1) / job.streams, streams = job.streams;
    const int parts = job.tokens % streams == 0 ? job.tokens / streams : 0;
    const u32 together = (job.n + me.together - 1) / me.together;
    for (u32 run = SPREAD_WARP; run < KINDS * job.layers * together; run += gridDim.x * ROW_WARPS) {
        const int row = run / together, block = run % together * me.together + me.row, kind = row >= job.layers;
        const bool there = block < job.n && job.status[block] == GOOD;
        if (!__any_sync(FULL, there)) continue;
        Reader reader{(const u16*)job.codes, 0, 0};
        u32 x = LOWEST;
        if (there) {
            const u8* section = job.codes + job.offsets[block] + job.starts[2 * block + kind];
            i64 place = (i64)block * KINDS * job.layers + row;
            reader.size = job.sizes[place];
            if (reader.size) reader.words = (const u16*)(section + front_nbytes(job, kind)) + job.places[place];
            const u16* state = (const u16*)(section + rows_at(job, kind) + sizes_nbytes(job));
            state += 2 * ((i64)(row - kind * job.layers) * streams + me.stream);
            x = state[0] | (u32)state[1] << 16;
            reader.prefetch(me, streams);
        }
        const bool begins = x >= LOWEST;
        const u32* table_of = job.table_of + (i64)row * all;
        const Step step(job, row, min(block, job.n - 1), me.stream);
        if (parts == 1) get_evenly<1>(job, x, reader, step, table_of, steps, there, slots, me);
        else if (parts == 4) get_evenly<4>(job, x, reader, step, table_of, steps, there, slots, me);
        else get_any_way(job, x, reader, step, table_of, steps, there, slots, me);
        if (there && !(begins && reader.at == reader.size && x == LOWEST)) job.status[block] = 0;
    }
}
