// Kernels of manthan.codec.cpu.klt: components of groups to words and back, and paged blocks to rows of the transform and
// back. A component is a number of a transformed vector. A row is all components of one group in one block and level. A
// warp takes rows of one group, in blocks that are neighbours in the batch, and a thread one rANS stream of a row. All
// levels of a number are coded one after the other.
//
// numbers: [components, width], fp16, from the transform or for the inverse. A symbol of a refinement is -1, 0 or 1.
// likely: by refinement, table and magnitude so far, the frequency of -1, and that of -1 and 0 together.

#define ESCAPE 255
#define SYMBOL_MAX 127
#define ROW_THREADS 1024
#define ROW_WARPS (ROW_THREADS / 32)
#define FURTHEST 32767.f
#define TOO_MANY 0x3fffffffu  // words
#define MAGNITUDES 4
#define PLACE_SHARE 0.125f  // factor on decoded components, so that fp16 holds the largest
#define OCTAVE_THIRD 0.33333334f

__device__ __forceinline__ int split_of(int level) { return level == 3 ? 3 : 2; }
// Index of a table for steps wider by j thirds of an octave. table: index of the first table of the shape, and width << 8.
__device__ __forceinline__ int shifted(int table, int j) { return (table & 255) + min(max((table >> 8) - j, 0), WIDTHS - 1); }

__device__ __forceinline__ const u8* fetch_tables(const LeveledSections& job) {
    extern __shared__ uint4 shared[];
    for (int i = threadIdx.x; i < job.tables_nbytes / 16; i += ROW_THREADS) shared[i] = ((const uint4*)job.tables)[i];
    __syncthreads();
    return (const u8*)shared;
}

// Way of a thread through its stream, forth or back: numbers i, i + streams, ... of a row. If all are of one token, the
// token's shift is read once.
struct Way {
    Half* numbers;
    const u16* table_of;
    const signed char* shifts;
    int component, token, further, rest, tokens, width, at, j;
    float larger;  // factor on the step by the token's shift j: 2**(j / 3)

    __device__ __forceinline__ Way(const LeveledSections& job, int g, int block, int number) {
        const Group group = job.groups[g];
        numbers = job.numbers + (i64)group.at * job.width + block * job.tokens;
        table_of = job.table_of + group.at;
        shifts = job.shifts + (i64)g * job.width + block * job.tokens;
        tokens = job.tokens, width = job.width;
        further = group.streams / tokens, rest = group.streams % tokens;
        component = number / tokens, token = number % tokens, at = component * width + token;
        find_shift();
    }
    __device__ __forceinline__ void find_shift() { j = __ldg(shifts + token), larger = exp2f(OCTAVE_THIRD * j); }
    __device__ __forceinline__ void forth() {
        component += further, at += further * width;
        if (rest == 0) return;
        token += rest, at += rest;
        if (token >= tokens) token -= tokens, component++, at += width - tokens;
        find_shift();
    }
    __device__ __forceinline__ void back() {
        component -= further, at -= further * width;
        if (rest == 0) return;
        token -= rest, at -= rest;
        if (token < 0) token += tokens, component--, at -= width - tokens;
        find_shift();
    }
};

// Tables for encoding. For each table a word: index of its first entry, its first symbol << 16, and its number of symbols
// besides the escape << 24. Then the entries of all tables, `likely` and `inverses`.
struct Entries {
    const u32 *tables, *likely, *inverses;
    __device__ __forceinline__ Entries(const LeveledSections& job, const u8* from)
        : tables((const u32*)from), likely((const u32*)(from + job.likely_at)), inverses((const u32*)(from + job.rest_at)) {}
    __device__ __forceinline__ u32 entry(int table, int value) const {
        const u32 told = tables[table], escape = told >> 24;
        const u32 rank = min((u32)(value + SYMBOL_MAX) - (told >> 16 & 255), escape);
        return tables[TABLES + (told & 0xffff) + rank] | (rank == escape ? 1u << 31 : 0);
    }
};

// Write a group's rows of all levels in `block`, if the thread's row is `there`. A row with a number beyond int16 gets the
// size TOO_MANY, so that the block does not fit.
__device__ __forceinline__ void put_rows(const LeveledSections& job, const Entries& entries, int g, int block, bool there,
                                         const Streams& me) {
    const Group group = job.groups[g];
    const int steps = (group.size * job.tokens + group.streams - 1) / group.streams;
    const i64 room = (i64)group.size * job.tokens / NUMBERS_A_WORD;
    u16* words = job.words + (i64)block * LEVELS * row_room(job) + (i64)group.at * job.tokens / NUMBERS_A_WORD;
    u32 x[LEVELS];
    int at[LEVELS];
#pragma unroll
    for (int level = 0; level < LEVELS; level++) x[level] = LOWEST, at[level] = there ? (int)room : -1;
    Way way(job, g, block, (steps - 1) * group.streams + me.stream);
    bool far = false, on = there && way.component < group.size;
    int next = on ? way.table_of[way.component] : 0;
    Half product = on ? way.numbers[way.at] : 0;
    for (int step = steps - 1; step >= 0; step--) {
        const float y = wide(product) / way.larger;
        const int table = shifted(next, way.j);
        const bool is = on;
        way.back();
        if (on = there && step > 0) product = way.numbers[way.at], next = __ldg(way.table_of + way.component);
        far = far || is && !(fabsf(y) <= FURTHEST);
        const int finest = __float2int_rn(fminf(fmaxf(y, -FURTHEST), FURTHEST));
        int sizes[LEVELS];
        sizes[3] = abs(finest), sizes[2] = (sizes[3] + 1) / 3, sizes[1] = sizes[2] >> 1, sizes[0] = sizes[1] >> 1;
        const int value = finest < 0 ? -sizes[0] : sizes[0];
        const u32 entry = entries.entry(table, value);
        put_any<true>(x[0], at[0], words, entry, entries.inverses[entry & 4095], value, is, me);
#pragma unroll
        for (int level = 1; level < LEVELS; level++) {
            if (level >= job.all) break;
            const int so_far = sizes[level - 1];
            int told = sizes[level] - split_of(level) * so_far;
            if (so_far == 0 && finest < 0) told = -told;
            const u32 likely = entries.likely[((level - 1) * TABLES + table) * MAGNITUDES + min(so_far, 3)];
            const u32 first = likely & 0xffff, second = likely >> 16;
            const u32 sum = told < 0 ? 0 : told == 0 ? first : second;
            const u32 often = told < 0 ? first : told == 0 ? second - first : 4096 - second;
            put_any<false>(x[level], at[level], words + level * row_room(job), sum << 12 | often,
                           entries.inverses[often & 4095], 0, is, me);
        }
    }
    const bool too_many = __ballot_sync(FULL, far) & me.group;
    if (!there) return;
#pragma unroll
    for (int level = 0; level < LEVELS; level++) {
        if (level >= job.all) break;
        const i64 place = (i64)block * LEVELS + level;
        job.states[place * job.streams + group.ahead + me.stream] = x[level];
        if (me.stream == 0)
            job.sizes[place * job.groups_count + g] = too_many || at[level] < 0 ? TOO_MANY : (u32)(room - at[level]);
    }
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1) encode_rows(const LeveledSections job) {
    const Entries entries(job, fetch_tables(job));
    for (u32 run = SPREAD_WARP; run < (u32)(job.groups_count * job.n); run += gridDim.x * ROW_WARPS) {
        const int g = run / job.n, first = run % job.n;
        const Streams me(job.groups[g].streams);
        if (first % me.together) continue;  // the warp of the first takes those that fit next to it
        const int block = first + me.row;
        put_rows(job, entries, g, min(block, job.n - 1), block < job.n && me.row < me.together, me);
    }
}

// Bytes of all parts of a block by the sizes of its rows.
__device__ __forceinline__ u64 all_nbytes(const LeveledSections& job, int block) {
    u64 nbytes = 0;
    for (int level = 0; level < job.all; level++) {
        u64 words = 0;
        const volatile u32* sizes = job.sizes + ((i64)block * LEVELS + level) * job.groups_count;
        for (int g = 0; g < job.groups_count; g++) words += sizes[g];
        nbytes += align16(part_nbytes(job, level, words)) + (level ? FRONT_NBYTES : 0);
    }
    return nbytes;
}

// Double the steps of blocks that do not fit until they do, a block of threads for each; this is rare. The status becomes 0
// if the largest steps do not help.
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1) double_steps(const LeveledSections job) {
    __shared__ int fits;
    const int warp = threadIdx.x / 32;
    const Entries entries(job, job.tables);
    for (u32 block = blockIdx.x; block < (u32)job.n; block += gridDim.x) {
        if (job.status[block] != GOOD) continue;
        while (true) {
            __syncthreads();
            if (threadIdx.x == 0) fits = all_nbytes(job, block) <= (u64)job.limit ? 1 : job.steps[block] + 3 <= MOST_K ? 0 : -1;
            __syncthreads();
            if (fits) break;
            for (i64 i = threadIdx.x; i < (i64)job.components * job.tokens; i += ROW_THREADS) {
                const i64 component = i / job.tokens;
                Half* number = (Half*)job.numbers + component * job.width + block * job.tokens + i % job.tokens;
                *number = narrow(wide(*number) * 0.5f);
            }
            if (threadIdx.x == 0) job.steps[block] += 3;
            __syncthreads();
            for (int g = warp; g < job.groups_count; g += ROW_WARPS) {
                const Streams me(job.groups[g].streams);
                put_rows(job, entries, g, block, me.row == 0, me);
            }
        }
        if (threadIdx.x == 0 && fits < 0) job.status[block] = 0;
    }
}

// A table for decoding, in bytes: first symbol; number of symbols besides the escape; for each of BUCKETS equal parts of
// the slots, the rank of the symbol that has its first slot; for each rank, and behind the last, the number of slots
// before it, 2 bytes each. A rank is a symbol's index in the table.
struct Ranks {
    const u8* at;

    __device__ __forceinline__ u32 symbol(u32 rank) const { return rank == at[1] ? ESCAPE : at[0] + rank; }
    __device__ __forceinline__ u32 before(u32 rank) const { return ((const u16*)(at + 2 + BUCKETS))[rank]; }
    __device__ __forceinline__ u32 rank(u32 slot) const {
        const u32 bucket = slot / (4096 / BUCKETS);
        const u8* ranks = at + 2;
        u32 low = ranks[bucket], high = bucket < BUCKETS - 1 ? ranks[bucket + 1] : at[1];
        while (low < high) {
            const u32 middle = (low + high + 1) / 2;
            if (before(middle) <= slot) low = middle;
            else high = middle - 1;
        }
        return low;
    }
};

// A stream of one level in a row that is decoded.
struct Level {
    Reader reader;
    u32 x;
    bool there, begins;

    __device__ __forceinline__ void find(const LeveledSections& job, int g, int block, int level, bool wanted, const Streams& me) {
        const Group group = job.groups[g];
        reader = Reader{(const u16*)job.buffer, 0, 0};
        x = LOWEST, there = wanted;
        if (there) {
            const u8* rows = job.buffer + job.offsets[block] + rows_at(job, block, level);
            const u32* sizes = job.sizes + ((i64)block * LEVELS + level) * job.groups_count;
            u64 before = 0;
            for (int i = 0; i < g; i++) before += sizes[i];
            reader.size = sizes[g];
            if (reader.size) reader.words = (const u16*)(rows + rows_front(job)) + before;
            const u16* state = (const u16*)(rows + 4ll * (job.groups_count + group.ahead + me.stream));
            x = state[0] | (u32)state[1] << 16;
            reader.prefetch(me, group.streams);
        }
        begins = x >= LOWEST;
    }
    __device__ __forceinline__ bool ends() const { return !there || begins && reader.at == reader.size && x == LOWEST; }
};

// Rows of one group that a warp decodes.
struct Decoding {
    const u8* tables;
    const u32* likely;
    const int* centres;
    float of_step;
    int most;  // the finest level of any of the warp's rows
    bool there;
    Level levels[LEVELS];

    // Decode a thread's next number. TAIL: some threads have none. table: see `shifted`.
    template <bool TAIL>
    __device__ __forceinline__ void step(const Way& way, int table, bool on, const Streams& me) {
        const int of = shifted(table, way.j);
        u32& x = levels[0].x;
        const Ranks ranks{tables + ((const u32*)tables)[of]};
        const u32 slot = x & 4095, rank = ranks.rank(slot), before = ranks.before(rank), symbol = ranks.symbol(rank);
        const bool escaped = symbol == ESCAPE && (!TAIL || on);
        const u32 next = (ranks.before(rank + 1) - before) * (x >> 12) + slot - before;
        const u32 raw = take_words(x, next, levels[0].reader, escaped, !TAIL || on, me);
        int value = escaped ? (short)raw : (int)symbol - SYMBOL_MAX;
#pragma unroll
        for (int level = 1; level < LEVELS; level++) {
            if (level > most) break;
            Level& at = levels[level];
            const u32 both = likely[((level - 1) * TABLES + of) * MAGNITUDES + min(abs(value), 3)];
            const u32 first = both & 0xffff, second = both >> 16, slot = at.x & 4095;
            const int told = slot < first ? -1 : slot < second ? 0 : 1;
            const u32 sum = told < 0 ? 0 : told == 0 ? first : second;
            const u32 often = (told < 0 ? first : told == 0 ? second : 4096) - sum;
            take_words(at.x, often * (at.x >> 12) + slot - sum, at.reader, false, !TAIL || on, me);
            if (at.there) value = split_of(level) * value + (value < 0 ? -told : told);
        }
        const int far = abs(value), centre = centres[of * MAGNITUDES + min(far, 3)];
        const float made = (far * of_step + centre * (PLACE_SHARE / FINE)) * way.larger;
        if (there && (!TAIL || on)) way.numbers[way.at] = narrow(value < 0 ? -made : made);
    }
};

// Decode the rows of good blocks up to the finest level that is there, to means of intervals times PLACE_SHARE, without the
// block's factor k of all steps. The status becomes 0 for words that no encoder writes. Right checksums were found before.
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1) decode_rows(const LeveledSections job) {
    const u8* tables = fetch_tables(job);
    for (u32 run = SPREAD_WARP; run < (u32)(job.groups_count * job.n); run += gridDim.x * ROW_WARPS) {
        const int g = run / job.n, first = run % job.n;
        const Group group = job.groups[g];
        const Streams me(group.streams);
        if (first % me.together) continue;
        const int block = min(first + me.row, job.n - 1);
        Decoding now;
        now.there = first + me.row < job.n && me.row < me.together && job.status[block] == GOOD;
        const int finest = now.there ? job.levels[block] : -1;
        now.most = __reduce_max_sync(FULL, finest);
        if (now.most < 0) continue;
#pragma unroll
        for (int level = 0; level < LEVELS; level++) now.levels[level].find(job, g, block, level, finest >= level, me);
        now.tables = tables, now.likely = (const u32*)(tables + job.likely_at);
        now.centres = (const int*)(tables + job.rest_at) + max(finest, 0) * TABLES * MAGNITUDES;
        now.of_step = (finest < 2 ? 12 >> max(finest, 0) : finest == 2 ? 3 : 1) * PLACE_SHARE;
        const int all = group.size * job.tokens, whole = all / group.streams;
        Way way(job, g, block, me.stream);
        int ahead = way.table_of[min(way.component, group.size - 1)];
        for (int step = 0; step < whole; step++) {
            const int table = ahead;
            ahead = __ldg(way.table_of + min(way.component + way.further + (way.rest ? 1 : 0), group.size - 1));
            now.step<false>(way, table, true, me);
            way.forth();
            if (way.rest) ahead = __ldg(way.table_of + min(way.component, group.size - 1));
        }
        if (all % group.streams) now.step<true>(way, ahead, way.component < group.size, me);
        bool good = true;
#pragma unroll
        for (int level = 0; level < LEVELS; level++) good = good && now.levels[level].ends();
        if (now.there && !good) job.status[block] = 0;
    }
}

// -- between numbers and components -----------------------------------------------------------------------------

// A run: a vector of one head in one block, in one of the groups that are worked on now. A warp takes one at a time.
struct Run {
    int kind, block, layer, head, g, column;
    Word* x;
    i64 row;  // of its first token, in rows or products

    __device__ __forceinline__ Run(const LeveledSections& job, u32 run) {
        const int size = job.groups[job.first_group].size, each = size / HEAD_DIM;
        block = run / each % job.n;
        g = run / each / job.n;
        const int vector = run % each;
        column = job.groups[job.first_group + g].at + vector * HEAD_DIM;
        const u32 where = job.vectors[column / HEAD_DIM];
        kind = where >> 15 & 1, layer = where >> 16, head = where & 0x7fff;
        x = (Word*)job.caches[layer] + job.block_ids[block] * job.block_stride + job.at[kind];
        x += (i64)head * job.head_stride;
        row = ((i64)g * job.width + block * job.tokens) * size + vector * HEAD_DIM;
    }
};

#define EACH_RUN(job, i, size) \
    for (u32 i = blockIdx.x * WARPS + threadIdx.x / 32; i < (u32)(job.some * job.n) * (size / HEAD_DIM); i += gridDim.x * WARPS)

// Fill rows with (x - mean) * gain. The status becomes 0 if a number is not finite, or does not fit into fp16.
extern "C" __global__ void __launch_bounds__(THREADS, 2) gather(const LeveledSections job) {
    const int lane = threadIdx.x % 32, beside = QUADS < 32 ? lane / QUADS : 0, size = job.groups[job.first_group].size;
    EACH_RUN(job, i, size) {
        const Run run(job, i);
        const float* cosines = cosines_of(job, run.block);
        bool bad = false;
        for (int q = QUADS < 32 ? lane % QUADS : lane; q < QUADS && beside < ABREAST; q += 32) {
            const Quad quad(job, run.kind, q);
            float mean[4], gain[4];
            quad.fetch<float2>(job.mean + run.column, mean, true);
            quad.fetch<float2>(job.gain + run.column, gain, true);
#pragma unroll 4
            for (int t = beside; t < job.tokens; t += ABREAST) {
                Word words[4];
                float x[4];
                Half halves[4];
                const float scale = scale_of(job, run.block, run.layer, run.head, t);
                quad.fetch<Words>(run.x + (i64)t * job.token_stride, words, ALIGNED);
#pragma unroll
                for (int k = 0; k < 4; k++) x[k] = load(words + k) * scale;
                quad.turn<true>(job, cosines, t, x);
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    x[k] = (x[k] - mean[k]) * gain[k];
                    bad = bad || !(fabsf(x[k]) < 65504.f);
                    halves[k] = narrow(x[k]);
                }
                quad.leave<Halves>(job.rows + run.row + (i64)t * size, halves, true);
            }
        }
        if (bad) job.status[run.block] = 0;
    }
}

// Fill shifts with j of each token and group: a regression on the numbers, and on logarithms of the vectors' energies.
extern "C" __global__ void __launch_bounds__(THREADS) weigh(const LeveledSections job) {
    const int lane = threadIdx.x % 32, size = job.groups[job.first_group].size, tokens = job.n * job.tokens;
    for (u32 i = blockIdx.x * WARPS + threadIdx.x / 32; i < (u32)(job.some * tokens); i += gridDim.x * WARPS) {
        const int g = i / tokens, t = i % tokens, at = job.groups[job.first_group + g].at;
        const Half* row = job.rows + ((i64)g * job.width + t) * size;
        float told = 0.f;
        for (int vector = 0; vector < size / HEAD_DIM; vector++) {
            float energy = 0.f;
            for (int c = vector * HEAD_DIM + lane; c < (vector + 1) * HEAD_DIM; c += 32) {
                const float z = wide(row[c]) + job.offset[at + c];
                told += z * job.weigher[at + c];
                energy += z * z;
            }
#pragma unroll
            for (int k = 16; k; k /= 2) energy += __shfl_xor_sync(FULL, energy, k);
            if (lane == 0) told += logf(energy / HEAD_DIM + 1e-3f) * job.weigher[job.components + at / HEAD_DIM + vector];
        }
#pragma unroll
        for (int k = 16; k; k /= 2) told += __shfl_xor_sync(FULL, told, k);
        told += job.weigher[job.components + job.components / HEAD_DIM + job.first_group + g];
        if (lane == 0) {
            const float j = told == told ? fminf(fmaxf(rintf(told), LEAST_J), LEAST_J + 15.f) : 0.f;
            job.shifts[(i64)(job.first_group + g) * job.width + t] = (signed char)j;
        }
    }
}

// Write rows of products of good blocks into the paged blocks, scaled, with the mean added and RoPE done.
extern "C" __global__ void __launch_bounds__(THREADS, 2) scatter(const LeveledSections job) {
    const int lane = threadIdx.x % 32, beside = QUADS < 32 ? lane / QUADS : 0, size = job.groups[job.first_group].size;
    EACH_RUN(job, i, size) {
        const Run run(job, i);
        if (job.status[run.block] != GOOD) continue;
        const float larger = exp2f(OCTAVE_THIRD * job.steps[run.block]) / PLACE_SHARE, *cosines = cosines_of(job, run.block);
        for (int q = QUADS < 32 ? lane % QUADS : lane; q < QUADS && beside < ABREAST; q += 32) {
            const Quad quad(job, run.kind, q);
            float mean[4], gain[4];
            quad.fetch<float2>(job.mean + run.column, mean, true);
            quad.fetch<float2>(job.gain + run.column, gain, true);
#pragma unroll 4
            for (int t = beside; t < job.tokens; t += ABREAST) {
                float x[4];
                Word words[4];
                const float scale = scale_of(job, run.block, run.layer, run.head, t);
                quad.fetch<float2>(job.products + run.row + (i64)t * size, x, true);
#pragma unroll
                for (int k = 0; k < 4; k++) x[k] = x[k] * larger * gain[k] + mean[k];
                quad.turn<false>(job, cosines, t, x);
#pragma unroll
                for (int k = 0; k < 4; k++) words[k] = store(fminf(fmaxf(x[k], -f(LARGEST)), f(LARGEST)) / scale);
                quad.leave<Words>(run.x + (i64)t * job.token_stride, words, ALIGNED);
            }
        }
    }
}
