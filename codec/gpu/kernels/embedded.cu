// Numbers of groups to words and back, level by level: manthan.codec.cpu.embedded, whose words these are, and what lies
// between paged blocks and numbers. A warp takes as many rows of one group, of blocks next to each other in the batch, as
// their streams fill it.
//
// numbers has for each component those of all tokens, the blocks' next to each other: finest ones while encoding, those
// of the level that was decoded last while decoding. Tables of the base are those of klt_tables.py; a refinement tells -1, 0 or
// 1, and `likely` has by table and magnitude so far how often it is -1, and -1 or 0.

#define ESCAPE 255
#define SYMBOL_MAX 127
#define ROW_THREADS 1024
#define ROW_WARPS (ROW_THREADS / 32)
#define FURTHEST 32767.f
#define MAGNITUDES 4
#define PLACE_SHARE 0.125f  // of places as fp16, so that none is too large for it
#define OCTAVE_THIRD 0.33333334f

__device__ __forceinline__ int split_of(int level) { return level == 3 ? 3 : 2; }
__device__ __forceinline__ int at_level(int finest, int level) {
    int magnitude = finest;
    if (level < 3) magnitude = (magnitude + 1) / 3;
    return level < 2 ? magnitude >> (2 - level) : magnitude;
}
__device__ __forceinline__ int shifted(int table, int j) {
    return table / WIDTHS * WIDTHS + min(max(table % WIDTHS - j, 0), WIDTHS - 1);
}

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

struct Place {  // a number of a row: its component in the group, and its token in the block
    int component, token;
    __device__ __forceinline__ Place(const Sections& job, int number) : component(number / job.tokens) {
        token = number - component * job.tokens;
    }
};

struct Row {  // that is encoded, of one stream
    u16* words;
    int at;
    u32 x;
};

struct Encoding {
    const Sections& job;
    const u32* entries;  // of the base
    Streams me;

    __device__ __forceinline__ Encoding(const Sections& job, const u8* tables, int streams)
        : job(job), entries((const u32*)tables), me(streams) {}

    // A row of one level, of `block` where it is `there`.
    __device__ __forceinline__ void put_row(int g, int block, bool there, int level) const {
        const Group group = job.groups[g];
        const int all = group.size * job.tokens, steps = (all + group.streams - 1) / group.streams;
        const i64 place = (i64)block * LEVELS + level;
        const i64 room = (i64)group.size * job.tokens / NUMBERS_A_WORD;
        Row row{job.words + place * row_room(job) + (i64)group.at * job.tokens / NUMBERS_A_WORD, there ? (int)room : -1,
                LOWEST};
        const short* numbers = job.numbers + (i64)group.at * job.width + block * job.tokens;
        const signed char* shifts = job.shifts + (i64)g * job.width + block * job.tokens;
        for (int step = steps - 1; step >= 0; step--) {
            const int number = step * group.streams + me.stream;
            const bool on = there && number < all;
            const Place at(job, on ? number : 0);
            const int finest = numbers[(i64)at.component * job.width + at.token], size = abs(finest);
            const int table = shifted(job.table_of[group.at + at.component], shifts[at.token]);
            u32 entry;
            int value = 0;
            if (level == 0) {
                value = finest < 0 ? -at_level(size, 0) : at_level(size, 0);
                entry = entries[256 * table + min((u32)(value + SYMBOL_MAX), (u32)ESCAPE)];
            } else {
                const int so_far = at_level(size, level - 1);
                int told = at_level(size, level) - split_of(level) * so_far;
                if (so_far == 0 && finest < 0) told = -told;
                const u32 likely = job.likely[((level - 1) * TABLES + table) * MAGNITUDES + min(so_far, 3)];
                const u32 first = likely & 0xffff, second = likely >> 16;
                const u32 sum = told < 0 ? 0 : told == 0 ? first : second;
                entry = sum << 12 | (told < 0 ? first : told == 0 ? second - first : 4096 - second);
            }
            put_any(row.x, row.at, row.words, entry, job.inverses[entry & 4095], value, on, me);
        }
        if (!there) return;
        job.states[place * job.streams + group.ahead + me.stream] = row.x;
        if (me.stream == 0) job.sizes[place * job.groups_count + g] = row.at < 0 ? 0x3fffffffu : (u32)(room - row.at);
    }
};

// Rows of one level, or of all that are written.
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1) encode_rows(const Sections job) {
    const u8* tables = fetch_tables(job);
    const u32 each = job.all * job.n;
    for (u32 run = SPREAD_WARP; run < job.groups_count * each; run += gridDim.x * ROW_WARPS) {
        const int g = run / each, level = run % each / job.n, first = run % job.n;
        const Encoding encoding(job, tables, job.groups[g].streams);
        if (first % encoding.me.together) continue;  // the warp of the first takes those that fit beside it
        const int block = first + encoding.me.row;
        encoding.put_row(g, min(block, job.n - 1), block < job.n && encoding.me.row < encoding.me.together, level);
    }
}

// Bytes of all parts, as they are coded now.
__device__ __forceinline__ u64 all_nbytes(const Sections& job, int block) {
    u64 nbytes = 0;
    for (int level = 0; level < job.all; level++) {
        u64 words = 0;
        const volatile u32* sizes = job.sizes + ((i64)block * LEVELS + level) * job.groups_count;
        for (int g = 0; g < job.groups_count; g++) words += sizes[g];
        nbytes += align16(part_nbytes(job, level, words)) + (level ? FRONT_NBYTES : 0);
    }
    return nbytes;
}

// Blocks that do not fit double their steps until they do, each by a block of threads. It is rare. A status becomes 0
// where nothing helps.
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1) double_steps(const Sections job) {
    __shared__ int fits;
    const int warp = threadIdx.x / 32;
    for (u32 block = blockIdx.x; block < (u32)job.n; block += gridDim.x) {
        while (true) {
            __syncthreads();
            if (threadIdx.x == 0) fits = all_nbytes(job, block) <= (u64)job.limit ? 1 : job.steps[block] + 3 <= MOST_K ? 0 : -1;
            __syncthreads();
            if (fits) break;
            for (i64 i = threadIdx.x; i < (i64)job.components * job.tokens; i += ROW_THREADS) {
                const Place at(job, i);
                short* number = job.numbers + (i64)at.component * job.width + block * job.tokens + at.token;
                *number = (short)__float2int_rn(*number * 0.5f);
            }
            if (threadIdx.x == 0) job.steps[block] += 3;
            __syncthreads();
            for (int run = warp; run < job.groups_count * job.all; run += ROW_WARPS) {
                const int g = run / job.all;
                const Encoding encoding(job, job.tables, job.groups[g].streams);
                encoding.put_row(g, block, encoding.me.row == 0, run % job.all);
            }
        }
        if (threadIdx.x == 0 && fits < 0) job.status[block] = 0;
    }
}

struct Slots {  // of the base's tables
    const u8 *tables, *pool;

    __device__ __forceinline__ u32 entry(int table, u32 x) const {
        const u8* from = tables + 16 * *(const u32*)(tables + 4 * table);
        const u32 slot = x & 4095, rank = pool[16 * *(const u16*)(from + 2 * (slot / 16)) + slot % 16];
        return *(const u32*)(from + 512 + 4 * rank);
    }
};

// Numbers of good blocks that have this level. A status becomes 0 for words of the base that no encoder writes; a
// refinement's are never that if its checksum is right, and then it is the same.
template <bool BASE>
__device__ __forceinline__ void decode_level(const Sections& job, int level) {
    const u8* tables = BASE ? fetch_tables(job) : nullptr;
    const Slots slots{tables, tables + job.pool};
    for (u32 run = SPREAD_WARP; run < (u32)(job.groups_count * job.n); run += gridDim.x * ROW_WARPS) {
        const int g = run / job.n, first = run % job.n;
        const Group group = job.groups[g];
        const Streams me(group.streams);
        if (first % me.together) continue;
        const int block = min(first + me.row, job.n - 1);
        const bool there = first + me.row < job.n && job.status[block] == GOOD && job.levels[block] >= level;
        if (!__any_sync(FULL, there)) continue;
        const i64 place = (i64)block * LEVELS + level;
        Reader reader{(const u16*)job.codes, 0, 0};
        u32 x = LOWEST;
        if (there) {
            const u8* rows = job.codes + job.offsets[block] + rows_at(job, block, level);
            const u32* sizes = job.sizes + place * job.groups_count;
            u64 before = 0;
            for (int i = 0; i < g; i++) before += sizes[i];
            reader.size = sizes[g];
            if (reader.size) reader.words = (const u16*)(rows + rows_front(job)) + before;
            const u16* state = (const u16*)(rows + 4ll * (job.groups_count + group.ahead + me.stream));
            x = state[0] | (u32)state[1] << 16;
            reader.prefetch(me, group.streams);
        }
        const bool begins = x >= LOWEST;
        const int all = group.size * job.tokens, steps = (all + group.streams - 1) / group.streams;
        short* numbers = job.numbers + (i64)group.at * job.width + block * job.tokens;
        const signed char* shifts = job.shifts + (i64)g * job.width + block * job.tokens;
        for (int step = 0; step < steps; step++) {
            const int number = step * group.streams + me.stream;
            const bool on = there && number < all;
            const Place at(job, on ? number : 0);
            short* kept = numbers + (i64)at.component * job.width + at.token;
            const int table = shifted(job.table_of[group.at + at.component], shifts[at.token]);
            if (BASE) {
                const u32 entry = slots.entry(table, x), symbol = entry >> 24;
                const u32 next = (entry & 4095) * (x >> 12) + (x & 4095) - (entry >> 12 & 4095);
                const bool escaped = on && symbol == ESCAPE;
                const u32 raw = take_words(x, next, reader, escaped, on, me);
                if (on) *kept = escaped ? (short)raw : (short)((int)symbol - SYMBOL_MAX);
            } else {
                const int so_far = on ? *kept : 0, size = abs(so_far);
                const u32 likely = job.likely[((level - 1) * TABLES + table) * MAGNITUDES + min(size, 3)];
                const u32 first = likely & 0xffff, second = likely >> 16, slot = x & 4095;
                const int told = slot < first ? -1 : slot < second ? 0 : 1;
                const u32 sum = told < 0 ? 0 : told == 0 ? first : second;
                const u32 often = told < 0 ? first : told == 0 ? second - first : 4096 - second;
                take_words(x, often * (x >> 12) + slot - sum, reader, false, on, me);
                const int split = split_of(level);
                if (on) *kept = so_far < 0 ? split * so_far - told : split * so_far + told;
            }
        }
        if (there && !(begins && reader.at == reader.size && x == LOWEST)) job.status[block] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1) decode_base(const Sections job) { decode_level<true>(job, 0); }
// `all` is the level.
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 1) decode_refinement(const Sections job) {
    decode_level<false>(job, job.all);
}

// -- between numbers and components -----------------------------------------------------------------------------

// What a lane's threads of a warp go through: a component of the groups of now, and tokens next to each other.
#define EACH_COMPONENT(job, i, size) \
    for (u32 i = blockIdx.x * WARPS + threadIdx.x / 32; i < (u32)(job.some * size); i += gridDim.x * WARPS)

// Finest whole numbers of the transform's products, [C, width] of each group. A status becomes 0 where one is no int16.
extern "C" __global__ void __launch_bounds__(THREADS) quantize(const Sections job) {
    const int lane = threadIdx.x % 32, size = job.groups[job.first_group].size, tokens = job.n * job.tokens;
    EACH_COMPONENT(job, i, size) {
        const int g = job.first_group + i / size;
        const float* from = job.products + (i64)i * job.width;
        short* to = job.numbers + ((i64)job.groups[g].at + i % size) * job.width;
        const signed char* shifts = job.shifts + (i64)g * job.width;
        for (int t = lane; t < tokens; t += 32) {
            const float y = from[t] * exp2f(-OCTAVE_THIRD * shifts[t]);
            if (!(fabsf(y) <= FURTHEST)) job.status[t / job.tokens] = 0;
            to[t] = (short)__float2int_rn(fminf(fmaxf(y, -FURTHEST), FURTHEST));
        }
    }
}

// Where numbers come back in the intervals of a block's level, times PLACE_SHARE and without its steps' k; as fp16 in
// the place of the numbers.
extern "C" __global__ void __launch_bounds__(THREADS) place_numbers(const Sections job) {
    const int lane = threadIdx.x % 32, size = job.groups[job.first_group].size, tokens = job.n * job.tokens;
    const int steps[] = {12, 6, 3, 1};
    EACH_COMPONENT(job, i, size) {
        const int g = job.first_group + i / size, component = job.groups[g].at + i % size;
        short* numbers = job.numbers + (i64)component * job.width;
        const signed char* shifts = job.shifts + (i64)g * job.width;
        const int table = job.table_of[component];
        for (int t = lane; t < tokens; t += 32) {
            const int block = t / job.tokens, level = job.levels[block], value = numbers[t], far = abs(value);
            float made = 0.f;
            if (job.status[block] == GOOD) {
                const int within = shifted(table, shifts[t]);
                const int centre = job.centres[(level * TABLES + within) * MAGNITUDES + min(far, 3)];
                made = (far * steps[level] + centre / (float)FINE) * exp2f(OCTAVE_THIRD * shifts[t]) * PLACE_SHARE;
            }
            ((Half*)numbers)[t] = narrow(value < 0 ? -made : made);
        }
    }
}

// What a warp works on: a vector of one head in one block, of the groups of now.
struct Run {
    int kind, block, g, column;
    Word* x;
    i64 row;  // of its first token, in rows or products

    __device__ __forceinline__ Run(const Sections& job, u32 run) {
        const int size = job.groups[job.first_group].size, each = size / HEAD_DIM;
        block = run / each % job.n;
        g = run / each / job.n;
        const int vector = run % each;
        column = job.groups[job.first_group + g].at + vector * HEAD_DIM;
        const u32 where = job.vectors[column / HEAD_DIM];
        kind = where >> 15 & 1;
        x = (Word*)job.caches[where >> 16] + job.block_ids[block] * job.block_stride + job.at[kind];
        x += (i64)(where & 0x7fff) * job.head_stride;
        row = ((i64)g * job.width + block * job.tokens) * size + vector * HEAD_DIM;
    }
    __device__ __forceinline__ const float* cosines(const Sections& job) const {
        return job.turns + ((i64)block * 2 * job.block_tokens + job.first_token) * PAIRS;
    }
};

#define EACH_RUN(job, i, size) \
    for (u32 i = blockIdx.x * WARPS + threadIdx.x / 32; i < (u32)(job.some * job.n) * (size / HEAD_DIM); i += gridDim.x * WARPS)

// Rows of (x - mean) * gain. A status becomes 0 where a number is not finite, or does not fit into fp16.
extern "C" __global__ void __launch_bounds__(THREADS, 2) gather(const Sections job) {
    const int lane = threadIdx.x % 32, beside = QUADS < 32 ? lane / QUADS : 0, size = job.groups[job.first_group].size;
    EACH_RUN(job, i, size) {
        const Run run(job, i);
        const float* cosines = run.cosines(job);
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
                quad.fetch<Words>(run.x + (i64)t * job.token_stride, words, ALIGNED);
#pragma unroll
                for (int k = 0; k < 4; k++) x[k] = load(words + k);
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

// j of each token and group: a regression on its numbers and on the logarithms of its vectors' energies.
extern "C" __global__ void __launch_bounds__(THREADS) weigh(const Sections job) {
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

// Rows of products of good blocks into the paged blocks.
extern "C" __global__ void __launch_bounds__(THREADS, 2) scatter(const Sections job) {
    const int lane = threadIdx.x % 32, beside = QUADS < 32 ? lane / QUADS : 0, size = job.groups[job.first_group].size;
    EACH_RUN(job, i, size) {
        const Run run(job, i);
        if (job.status[run.block] != GOOD) continue;
        const float larger = exp2f(OCTAVE_THIRD * job.steps[run.block]) / PLACE_SHARE, *cosines = run.cosines(job);
        for (int q = QUADS < 32 ? lane % QUADS : lane; q < QUADS && beside < ABREAST; q += 32) {
            const Quad quad(job, run.kind, q);
            float mean[4], gain[4];
            quad.fetch<float2>(job.mean + run.column, mean, true);
            quad.fetch<float2>(job.gain + run.column, gain, true);
#pragma unroll 4
            for (int t = beside; t < job.tokens; t += ABREAST) {
                float x[4];
                Word words[4];
                quad.fetch<float2>(job.products + run.row + (i64)t * size, x, true);
#pragma unroll
                for (int k = 0; k < 4; k++) x[k] = x[k] * larger * gain[k] + mean[k];
                quad.turn<false>(job, cosines, t, x);
#pragma unroll
                for (int k = 0; k < 4; k++) words[k] = store(fminf(fmaxf(x[k], -f(LARGEST)), f(LARGEST)));
                quad.leave<Words>(run.x + (i64)t * job.token_stride, words, ALIGNED);
            }
        }
    }
}
