// Rows of manthan.codec.wht: numbers of the paged cache to whole numbers of steps, and back. A row is a layer's keys or
// a layer's values of a KV block; a run is one head's part of a row. Fronts: see sections.cu.
//
// `rounded` has the whole numbers of each row, ordered by rANS stream (manthan.codec.cpu.rans). Number i of a row
// [heads, HEAD_DIM, tokens] is number i / streams of stream i % streams. An octet is eight consecutive numbers of a
// stream. The first octets of all streams come first, then the second octets of all streams, and further ones.

#define TABLES 28
#define OCTAVE 3              // number of tables from one standard deviation to twice that deviation
#define ROWS ((HEAD_DIM + 31) / 32)  // numbers of a mean in each thread: number r is element 32 r + lane
#define MEAN_TOP ((1 << (MEAN_BITS - 1)) - 1)
#define STEP_END ((127 + 100 + 2) << 7)  // bf16 bits: the steps of all means are below
#define SCALE_MAX 0xfef
#define SCALE_END 0xff0
#define SMALLEST 0x00800000u  // bits of the smallest normal float32
#define ROUNDS 12582912.f     // 1.5 * 2**23: x + ROUNDS has the whole number nearest to x in the low bits
#define MOST_STEPS 8191.f     // largest magnitude of a mean in steps of its row
#define FINEST 0.00390625f    // least step of a row of keys, as a fraction of the largest step of the row's means
#define STRIDE (HEAD_DIM + 4)  // elements from a transformed vector to the next one, in shared memory or `spare`
#define SHORT_STRIDE (HEAD_DIM + 8)

struct Wht : Sections {  // with scratch, and the arithmetic's constants
    u16* rounded;                     // [rows, n, row_room]
    float* spare;                     // a row for each thread block; null if shared memory holds the row
    const uint4 *encoding, *decoding;  // see whole.cu
    i64 means_at, row_steps_at, scales_at, tables_at[2];  // byte offsets in the fronts
    u32 row_room;                     // numbers of a row in `rounded`, with padding to whole octets
    u32 bounds[TABLES - 1];           // sums of squares of a run from which on the next table is better
    float one_token, one_number;      // 1 / tokens, 1 / numbers of a row
    float key_step, value_step;       // steps, in deviations of the numbers
    int abreast;                      // tokens / streams if 1, 2 or 4 and HEAD_DIM <= 256, else 0: see octet_at
    int staged;                       // 1 if `abreast` is 0 and a warp first copies its run to shared memory
};

struct Run {  // a warp works on a run at a time
    int row, kind, layer, block, head;
    Word* x;

    __device__ __forceinline__ Run(const Sections& job, u32 run) {
        head = run % job.heads;
        block = run / job.heads % job.n;
        row = run / job.heads / job.n;
        kind = row >= job.layers, layer = row - kind * job.layers;
        x = (Word*)job.caches[layer] + job.block_ids[block] * job.block_stride + job.at[kind] + head * job.head_stride;
    }
};

__device__ __forceinline__ u32 log_of(int streams) { return __ffs(streams) - 1; }
__device__ __forceinline__ bool is_small(float step) { return step < f(SMALLEST); }

struct Walk {  // component (of heads * HEAD_DIM) and token of an octet's numbers, one by one
    u32 component, token;

    __device__ __forceinline__ Walk(const Sections& job, u32 octet) {
        const u32 log = log_of(job.streams), i = (octet >> log) << (log + 3) | octet & (job.streams - 1);
        component = i / job.tokens, token = i % job.tokens;
    }
    __device__ __forceinline__ void next(u32 tokens, u32 components_on, u32 tokens_on) {
        component += components_on, token += tokens_on;
        if (token >= tokens) token -= tokens, component++;
    }
};

// y / step, to the nearest whole number, ties to even. inverse: 1 / step, up to rounding.
__device__ __forceinline__ int whole_steps(float y, float step, float inverse) {
    float t = y * inverse, rounded = __fadd_rn(t, ROUNDS), off = fabsf(t - (rounded - ROUNDS));
    if (off + fabsf(t) * 4e-7f > 0.49999f) rounded = __fadd_rn(rintf(__fdiv_rn(y, step)), ROUNDS);
    return (int)b(rounded) - 0x4b400000;
}

__device__ __forceinline__ bool too_large(const float (&x)[8]) {
    u32 top = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) top = max(top, b(x[k]) & 0x7fffffffu);
    return top >= WHT_LIMIT_BITS;
}

// Decode a run's mean from bit planes to shared memory. step: bf16 bits of the mean's step.
__device__ __forceinline__ void decode_mean(u32 step, const u8* planes, float* mean, int lane) {
    for (int i = lane; i < HEAD_DIM; i += 32) {
        int code = 0;
        for (int p = 0; p < MEAN_BITS; p++) code = code << 1 | (planes[p * (HEAD_DIM / 8) + i / 8] >> (i % 8) & 1);
        float magnitude = (code & MEAN_TOP) * f(step << 16);
        mean[i] = code > MEAN_TOP ? -magnitude : magnitude;
    }
    __syncwarp();
}

// Return the sum over tokens of x[0], x[STRIDE], ...
__device__ __forceinline__ float token_sum(const float* x, int tokens) {
    float v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        v[k] = 0.f;
        for (int t = k; t < tokens; t += 8) v[k] = __fadd_rn(v[k], x[t * STRIDE]);
    }
    return fold(v);
}

// Return an element of a mean as a whole number of steps of its row.
__device__ __forceinline__ float whole_mean(float mean, float step) {
    if (is_small(step)) return 0.f;
    return fminf(fmaxf(rintf(__fdiv_rn(mean, step)), -MOST_STEPS), MOST_STEPS);
}

// Write the rounded mean of a run's transformed keys y to shared memory, and the mean's step and bit planes to the front.
__device__ __forceinline__ void take_mean(const Wht& job, const Run& run, const float* y, float* mean, int lane) {
    float average[ROWS], largest = 0.f;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int i = 32 * r + lane;
        average[r] = i < HEAD_DIM ? __fmul_rn(token_sum(y + i, job.tokens), job.one_token) : 0.f;
        largest = fmaxf(largest, fabsf(average[r]));
    }
    u32 step = bf16_bits(b(__fmul_rn(f(__reduce_max_sync(FULL, b(largest))), 1.f / MEAN_TOP)));
    if (step < 1 << 7) step = 0;
    const float width = f(step << 16);
    const i64 index = run.layer * job.heads + run.head;
    u8 *front = job.fronts + 2 * run.block * job.fronts_nbytes;
    u8* planes = front + job.means_at + index * MEAN_BITS * (HEAD_DIM / 8);
    if (lane == 0) ((u16*)front)[index] = step;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int i = 32 * r + lane, code = step ? __float2int_rn(__fdiv_rn(average[r], width)) : 0;
        code = min(max(code, -MEAN_TOP), MEAN_TOP);
        if (i < HEAD_DIM) mean[i] = __fmul_rn((float)code, width);
        int bits = abs(code) | (code < 0 ? MEAN_TOP + 1 : 0);
#pragma unroll
        for (int p = 0; p < MEAN_BITS; p++) {
            u32 word = __ballot_sync(FULL, bits >> (MEAN_BITS - 1 - p) & 1);
            if (lane < 4 && 4 * r + lane < HEAD_DIM / 8) planes[p * (HEAD_DIM / 8) + 4 * r + lane] = word >> (8 * lane);
        }
    }
    __syncwarp();
}

// Write a run's transformed vectors to y, keys without RoPE; and the energies (sums of squares) of values. Return the
// first token of which this thread reads a number that is too large, infinite or NaN; job.tokens if none.
__device__ __forceinline__ int transform(const Wht& job, const Run& run, const Turner& turner, const Share& share, float* y,
                                         float* energies, int lane) {
    int bad = job.tokens;
#pragma unroll 1
    for (int first = 0; first < job.tokens; first += VECTORS) {
        const int t = first + share.beside;
        const bool on = t < job.tokens;
        const Vector vector{turner, run.x + t * job.token_stride};
        const float scale = on ? scale_of(job, run.block, run.layer, run.head, t) : 1.f;
        float v[HELD];
#pragma unroll
        for (int o = 0; o < OCTETS; o++) {
            const int e = share.e + 8 * o;
            float x[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
            if (on && e < HEAD_DIM) {
                vector.octet(e, x);
#if SCALES
#pragma unroll
                for (int k = 0; k < 8; k++) x[k] = __fmul_rn(x[k], scale);
#endif
                if (too_large(x)) bad = min(bad, t);
                turn<true>(turner, e, t, x, vector);
            }
#pragma unroll
            for (int k = 0; k < 8; k++) v[8 * o + k] = __fmul_rn(x[k], share.weights[8 * o + k]);
        }
        hadamard(v, share, lane);
        if (run.kind) {
            float sum = product(v, v, lane);
            if (on && share.head) energies[t] = sum;
        }
#pragma unroll
        for (int o = 0; o < OCTETS; o++)
            if (on && share.e + 8 * o < HEAD_DIM) store_octet(y + t * STRIDE + share.e + 8 * o, v + 8 * o);
    }
    __syncwarp();
    return bad;
}

// Write the sum of squares of each transformed key of a run, less the run's mean.
__device__ __forceinline__ void take_energies(const Wht& job, const Share& share, const Mean& mean, const float* y,
                                              float* energies, int lane) {
    const int tokens = job.tokens;
#pragma unroll 1
    for (int first = 0; first < tokens; first += VECTORS) {
        const int t = first + share.beside;
        float v[HELD];
#pragma unroll
        for (int o = 0; o < OCTETS; o++) {
            const int e = share.e + 8 * o;
            float x[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f}, kept[8];
            if (t < tokens && e < HEAD_DIM) {
                load_octet(y + t * STRIDE + e, x);
                mean.octet(e, kept);
#pragma unroll
                for (int k = 0; k < 8; k++) x[k] = __fsub_rn(x[k], kept[k]);
            }
#pragma unroll
            for (int k = 0; k < 8; k++) v[8 * o + k] = x[k];
        }
        float sum = product(v, v, lane);
        if (t < tokens && share.head) energies[t] = sum;
    }
    __syncwarp();
}

// Subtract the run's mean, rounded to whole steps of the row, from the run's transformed keys.
__device__ __forceinline__ void subtract_mean(const Wht& job, const Run& run, const Share& share, float step, float* mean,
                                              float* y, int lane) {
    const i64 index = run.layer * job.heads + run.head;
    const u8* front = job.fronts + 2 * run.block * job.fronts_nbytes;
    __syncwarp();
    decode_mean(((const u16*)front)[index], front + job.means_at + index * MEAN_BITS * (HEAD_DIM / 8), mean, lane);
    for (int i = lane; i < HEAD_DIM; i += 32) mean[i] = __fmul_rn(whole_mean(mean[i], step), step);
    __syncwarp();
#pragma unroll 1
    for (int t = share.beside; t < job.tokens; t += VECTORS) {
#pragma unroll
        for (int e = share.e; e < share.e + HELD; e += 8) {
            if (e >= HEAD_DIM) continue;
            float x[8], kept[8];
            load_octet(y + t * STRIDE + e, x);
            load_octet(mean + e, kept);
#pragma unroll
            for (int k = 0; k < 8; k++) x[k] = __fsub_rn(x[k], kept[k]);
            store_octet(y + t * STRIDE + e, x);
        }
    }
}

// Write to `steps` the step that each value vector is divided by, and to the front the encoded step that decoding
// multiplies with. energies: sums of squares; become the inverses of `steps`.
__device__ __forceinline__ void step_values(const Wht& job, const Run& run, const Share& share, const float* y,
                                            float* energies, float* steps, int lane) {
    const i64 index = run.layer * job.heads + run.head;
    u8* scales = job.fronts + (2 * run.block + 1) * job.fronts_nbytes + job.scales_at + index * (1 + job.tokens);
    for (int t = lane; t < job.tokens; t += 32) {
        float step = __fmul_rn(__fmul_rn(__fsqrt_rn(energies[t]), f(ROOT)), job.value_step);
        steps[t] = is_small(step) ? 0.f : step;
    }
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < job.tokens; first += VECTORS) {
        const int t = first + share.beside;
        const bool on = t < job.tokens;
        const float step = on ? steps[t] : 0.f, inverse = step > 0.f ? 1.f / step : 0.f;
        float v[HELD], q[HELD];
#pragma unroll
        for (int o = 0; o < OCTETS; o++) {
            const int e = share.e + 8 * o;
            float x[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
            if (on && e < HEAD_DIM) load_octet(y + t * STRIDE + e, x);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                v[8 * o + k] = x[k];
                q[8 * o + k] = step > 0.f ? (float)(short)whole_steps(x[k], step, inverse) : 0.f;
            }
        }
        const float sum = product(v, q, lane);
        if (on && share.head) energies[t] = __fdiv_rn(energies[t], fmaxf(sum, f(SMALLEST)));
    }
    __syncwarp();
    int largest = 0;
    for (int t = lane; t < job.tokens; t += 32) {
        int scale = min((bf16_bits(b(energies[t])) + 4) >> 3, (u32)SCALE_MAX);
        energies[t] = f(scale);
        largest = max(largest, scale);
    }
    const int octave = max((int)__reduce_max_sync(FULL, largest) >> 4, 15) - 15;
    if (lane == 0) scales[0] = octave;
    for (int t = lane; t < job.tokens; t += 32) {
        scales[1 + t] = max((int)b(energies[t]) - 16 * octave, 0);
        energies[t] = steps[t] > 0.f ? 1.f / steps[t] : 0.f;
    }
}

// Write a row of keys' step to the front. Return the step, or 0 if it is too small. energies: overwritten by sums.
__device__ __forceinline__ float step_keys(const Wht& job, int block, int layer, float* energies) {
    for (int n = job.heads * job.tokens; n > 1; n = (n + 1) / 2) {
        const int half = (n + 1) / 2;
        for (int i = threadIdx.x; i < n - half; i += blockDim.x) energies[i] = __fadd_rn(energies[i], energies[half + i]);
        __syncthreads();
    }
    u8* at = job.fronts + 2 * block * job.fronts_nbytes;
    u32 widest = 0;  // bf16 bits of the largest step of the row's means
    for (int head = 0; head < job.heads; head++) widest = max(widest, (u32)((const u16*)at)[layer * job.heads + head]);
    const float step = __fmul_rn(__fsqrt_rn(__fmul_rn(energies[0], job.one_number)), job.key_step);
    const u32 fine = b(fmaxf(step, __fmul_rn(f(widest << 16), FINEST)));
    const u32 bits = (fine + 0xfffff + (fine >> 21 & 1)) >> 21 << 5;
    at += job.row_steps_at + 2 * layer;
    if (threadIdx.x < 2) at[threadIdx.x] = bits >> 8 * threadIdx.x;
    return is_small(f(bits << 16)) ? 0.f : f(bits << 16);
}

// Return the index of the first of `abreast` octets with elements e to e + 7 of tokens stream, stream + streams, ... of
// a head. Each further octet is `streams` octets behind.
__device__ __forceinline__ u32 octet_at(const Sections& job, int head, int e, int stream, int abreast) {
    return (head * HEAD_DIM + e) / 8 * abreast * job.streams + stream;
}

__device__ __forceinline__ void add_squares(u32* squares, u32 head, u32 sum) {
    const u32 leader = __shfl_sync(FULL, head, 0);
    if (__all_sync(FULL, head == leader || !sum)) {
        sum = __reduce_add_sync(FULL, sum);
        if (threadIdx.x % 32 == 0 && sum) atomicAdd(squares + leader, sum);
    } else if (sum) {
        atomicAdd(squares + head, sum);
    }
}

// Do what round_row does, if abreast is ABREAST: a thread rounds eight elements of ABREAST tokens at once.
template <int ABREAST>
__device__ __forceinline__ void round_octets(const Wht& job, u32 at, const float* y, float key_step, const float* steps,
                                             const float* inverses, u32* squares) {
    const float key_inverse = key_step > 0.f ? 1.f / key_step : 0.f;
    uint4* to = (uint4*)(job.rounded + (i64)at * job.row_room);
    const u32 each = HEAD_DIM / 8 * job.streams, units = job.heads * each, log = log_of(job.streams);
    for (u32 first = 0; first < units; first += blockDim.x) {
        const u32 unit = first + threadIdx.x, head = unit / each, stream = unit & (job.streams - 1);
        const u32 e = (unit >> log) % (HEAD_DIM / 8) * 8;
        u32 sum = 0, packed[ABREAST][4];
        if (unit < units) {
#pragma unroll
            for (int i = 0; i < ABREAST; i++) {
                const u32 vector = head * job.tokens + stream + (i << log);
                float x[8], step = key_step, inverse = key_inverse;
                if (key_step < 0.f) step = steps[vector], inverse = inverses[vector];
                load_octet(y + vector * STRIDE + e, x);
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    const int q = step > 0.f ? (short)whole_steps(x[k], step, inverse) : 0;
                    const int place = k * ABREAST + i;  // index among the ABREAST octets' numbers
                    sum += q * q;
                    if (place % 2) packed[place / 8][place % 8 / 2] |= q << 16;
                    else packed[place / 8][place % 8 / 2] = q & 0xffff;
                }
            }
            const u32 octet = octet_at(job, head, e, stream, ABREAST);
#pragma unroll
            for (int i = 0; i < ABREAST; i++)
                to[octet + (i << log)] = make_uint4(packed[i][0], packed[i][1], packed[i][2], packed[i][3]);
        }
        add_squares(squares, head, sum);
    }
}

// Write a row's whole numbers to `rounded`, and add their squares to each head's `squares`. key_step: step of a row of
// keys; negative for values, which have `steps`.
__device__ __forceinline__ void round_row(const Wht& job, u32 at, const float* y, float key_step, const float* steps,
                                          const float* inverses, u32* squares) {
    const u32 octets = job.row_room / 8, on = job.streams / job.tokens, tokens_on = job.streams % job.tokens;
    const float key_inverse = key_step > 0.f ? 1.f / key_step : 0.f;
    for (u32 first = 0; first < octets; first += blockDim.x) {
        const u32 octet = first + threadIdx.x;
        Walk walk(job, octet);
        u32 head = walk.component / HEAD_DIM, sum = 0, packed[4];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const u32 here = walk.component / HEAD_DIM, vector = here * job.tokens + walk.token;
            int q = 0;
            if (here < job.heads) {
                float step = key_step, inverse = key_inverse;
                if (key_step < 0.f) step = steps[vector], inverse = inverses[vector];
                if (step > 0.f) q = (short)whole_steps(y[vector * STRIDE + walk.component % HEAD_DIM], step, inverse);
            }
            if (here != head) {
                if (sum) atomicAdd(squares + head, sum);
                head = here, sum = 0;
            }
            sum += q * q;
            if (k % 2) packed[k / 2] |= q << 16;
            else packed[k / 2] = q & 0xffff;
            walk.next(job.tokens, on, tokens_on);
        }
        if (octet < octets)
            ((uint4*)(job.rounded + (i64)at * job.row_room))[octet] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        add_squares(squares, head, sum);
    }
}

// Round the rows of all blocks; write fronts. A status becomes the lowest index, among the lossy keys or among the lossy
// values of a block, of a vector with a number that is too large, infinite or NaN.
extern "C" __global__ void __launch_bounds__(256, 3) round_rows(const Wht job) {
    extern __shared__ uint4 shared[];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, warps = blockDim.x / 32;
    const int vectors = job.heads * job.tokens, even = (vectors + 3) & ~3;
    float *energies = (float*)shared, *steps = energies + even;
    u32* squares = (u32*)(steps + even);
    float* means = (float*)(squares + ((job.heads + 3) & ~3));
    float* y = job.spare ? job.spare + (i64)blockIdx.x * vectors * STRIDE : means + warps * HEAD_DIM;
    const Share share(lane);
    for (u32 at = blockIdx.x; at < (u32)(KINDS * job.layers * job.n); at += gridDim.x) {
        const Run first(job, at * job.heads);
        for (int head = thread; head < job.heads; head += blockDim.x) squares[head] = 0;
        for (int head = warp; head < job.heads; head += warps) {
            const Run run(job, at * job.heads + head);
            const Turner turner{job, cosines_of(job, run.block), run.kind == 0};
            const Mean mean{means + warp * HEAD_DIM};
            float* run_y = y + head * job.tokens * STRIDE;
            const int bad = __reduce_min_sync(
                FULL, transform(job, run, turner, share, run_y, energies + head * job.tokens, lane));
            if (lane == 0 && bad < job.tokens)
                atomicMin(job.status + run.block, (run.layer * job.heads + head) * job.tokens + bad);
            if (run.kind) {
                step_values(job, run, share, run_y, energies + head * job.tokens, steps + head * job.tokens, lane);
            } else {
                take_mean(job, run, run_y, means + warp * HEAD_DIM, lane);
                take_energies(job, share, mean, run_y, energies + head * job.tokens, lane);
            }
        }
        __syncthreads();
        float key_step = -1.f;
        if (first.kind == 0) {
            key_step = step_keys(job, first.block, first.layer, energies);
            for (int head = warp; head < job.heads; head += warps)
                subtract_mean(job, Run(job, at * job.heads + head), share, key_step, means + warp * HEAD_DIM,
                              y + head * job.tokens * STRIDE, lane);
            __syncthreads();
        }
        if (job.abreast == 1) round_octets<1>(job, at, y, key_step, steps, energies, squares);
        else if (job.abreast == 2) round_octets<2>(job, at, y, key_step, steps, energies, squares);
        else if (job.abreast == 4) round_octets<4>(job, at, y, key_step, steps, energies, squares);
        else round_row(job, at, y, key_step, steps, energies, squares);
        __syncthreads();
        u8 *front = job.fronts + (2 * first.block + first.kind) * job.fronts_nbytes;
        u8* tables = front + job.tables_at[first.kind] + first.layer * job.heads;
        for (int head = thread; head < job.heads; head += blockDim.x) {
            int table = 0;
            for (int i = 0; i < TABLES - 1; i++) table += squares[head] >= job.bounds[i];
            tables[head] = table;
        }
        if (first.layer + 1 == job.layers && front + job.parts[first.kind] - tables - job.heads > thread)
            tables[job.heads + thread] = 0;  // zeros up to a multiple of 4 bytes
        __syncthreads();
    }
}

// Check the fronts of good blocks. A status becomes 0 if a section has a step or a table that no encoder writes.
extern "C" __global__ void check_fronts(const Wht job) {
    const int lane = threadIdx.x % 32, runs = job.layers * job.heads;
    for (u32 i = SPREAD_WARP; i < (u32)(KINDS * job.n); i += gridDim.x * WARPS) {
        const int block = i / KINDS, kind = i % KINDS, at = 2 * block + kind;
        if (*(volatile int*)(job.status + block) != GOOD) continue;
        const u8* front = job.buffer + job.offsets[block] + job.starts[at] + START_NBYTES;
        bool good = true;
        for (int run = lane; run < runs; run += 32) {
            good = good && front[job.tables_at[kind] + run] < TABLES;
            if (kind == 0) {
                good = good && ((const u16*)front)[run] < STEP_END;
            } else {
                const u8* scales = front + job.scales_at + (i64)run * (1 + job.tokens);
                int largest = 0;
                for (int t = 1; t <= job.tokens; t++) largest = max(largest, (int)scales[t]);
                good = good && (largest == 0 || 16 * scales[0] + largest < SCALE_END);
            }
        }
        for (int layer = lane; kind == 0 && layer < job.layers; layer += 32) {
            const u8* step = front + job.row_steps_at + 2 * layer;
            good = good && (step[0] | step[1] << 8) < ROW_STEP_END;
        }
        if (!__all_sync(FULL, good) && lane == 0) job.status[block] = 0;
    }
}

// Return the whole number from an element of `rounded`, to which decode_words has added 127, modulo 2**16.
__device__ __forceinline__ float number_of(u32 kept) { return (float)(short)(kept - 127); }

// Copy a run's numbers from `rounded`, still plus 127, to shared memory [tokens][SHORT_STRIDE].
__device__ __forceinline__ void stage(const Wht& job, const Run& run, u16* to, int lane) {
    const u32 of_run = HEAD_DIM * job.tokens, log = log_of(job.streams), begin = run.head * HEAD_DIM;
    const u32 on = job.streams / job.tokens, tokens_on = job.streams % job.tokens;
    const u32 first = run.head * of_run >> (log + 3) << log;
    const u32 end = ((run.head + 1) * of_run - 1 >> (log + 3)) + 1 << log;
    const uint4* from = (const uint4*)(job.rounded + ((i64)run.row * job.n + run.block) * job.row_room);
    for (u32 octet = first + lane; octet < end; octet += 32) {
        Walk walk(job, octet);
        const uint4 words = from[octet];
        const u32 four[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const u32 e = walk.component - begin;
            if (e < HEAD_DIM) to[walk.token * SHORT_STRIDE + e] = four[k / 2] >> 16 * (k % 2);
            walk.next(job.tokens, on, tokens_on);
        }
    }
    __syncwarp();
}

// Fetch the whole numbers of elements e to e + 7 of a run's token t, from `staged` or from `rounded`.
__device__ __forceinline__ void fetch_octet(const Wht& job, const Run& run, const u16* staged, int e, int t, float* x) {
    if (job.staged) {
        const uint4 words = *(const uint4*)(staged + t * SHORT_STRIDE + e);
        const u32 four[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int k = 0; k < 8; k++) x[k] = number_of(four[k / 2] >> 16 * (k % 2));
        return;
    }
    const u16* row = job.rounded + ((i64)run.row * job.n + run.block) * job.row_room;
    const u32 log = log_of(job.streams);
    for (int k = 0; k < 8; k++) {
        const u32 i = (run.head * HEAD_DIM + e + k) * job.tokens + t, step = i >> log;
        x[k] = number_of(row[((step >> 3 << log | i & (job.streams - 1)) << 3) + (step & 7)]);
    }
}

struct Restored {  // a run that is decoded, and its steps and mean in the front
    const Wht& job;
    const Run& run;
    const Turner turner;
    const u8 *front, *scales;
    float key_step;
    int doublings;

    __device__ __forceinline__ Restored(const Wht& job, const Run& run)
        : job(job), run(run), turner{job, cosines_of(job, run.block), run.kind == 0}, key_step(0.f),
          doublings(job.doublings[2 * run.block + run.kind]) {
        front = job.buffer + job.offsets[run.block] + job.starts[2 * run.block + run.kind] + START_NBYTES;
        scales = front + job.scales_at + (i64)(run.layer * job.heads + run.head) * (1 + job.tokens);
        const u8* row_step = front + job.row_steps_at + 2 * run.layer;
        if (run.kind == 0) key_step = f((row_step[0] | row_step[1] << 8) << 16);
    }
    // Decode the mean of keys as whole numbers of the row's step; nothing for values.
    __device__ __forceinline__ void fetch_mean(float* mean, int lane) const {
        const i64 index = run.layer * job.heads + run.head;
        if (run.kind) return;
        decode_mean(((const u16*)front)[index], front + job.means_at + index * MEAN_BITS * (HEAD_DIM / 8), mean, lane);
        for (int i = lane; i < HEAD_DIM; i += 32) mean[i] = whole_mean(mean[i], key_step);
        __syncwarp();
    }
    __device__ __forceinline__ float step(int t) const {
        if (run.kind == 0) return key_step;
        const int code = scales[1 + t];
        const float step = f((u32)(code ? (16 * scales[0] + code) << 3 : 0) << 16);
        return doublings ? fminf(__fmul_rn(step, (float)(1 << doublings)), f(LARGEST)) : step;
    }
    // Restore token t from its whole numbers v into the cache. on: true if there is a token t with elements of this
    // thread; if not, the thread writes nothing to the cache. turned: room in shared memory for VECTORS vectors.
    __device__ __forceinline__ void keep(float (&v)[HELD], const Share& share, const Mean& mean, float* turned, int t,
                                         bool on, int lane) const {
        if (turner.keys) {
#pragma unroll
            for (int o = 0; o < OCTETS; o++) {
                float kept[8];
                if (!on || share.e + 8 * o >= HEAD_DIM) continue;
                mean.octet(share.e + 8 * o, kept);
#pragma unroll
                for (int k = 0; k < 8; k++)
                    v[8 * o + k] = (float)(short)(((int)v[8 * o + k] << doublings) + (int)kept[k]);
            }
        }
        hadamard(v, share, lane);
        const Vector vector{turner, run.x + t * job.token_stride};
        const float largest = run.kind && DTYPE == 2 ? f(0x7f7fffffu) : f(LARGEST), step = on ? this->step(t) : 0.f;
        const float scale = on ? scale_of(job, run.block, run.layer, run.head, t) : 1.f;
        const Mean whole{turned + share.beside * HEAD_DIM};
#pragma unroll
        for (int k = 0; k < HELD; k++) v[k] = __fmul_rn(__fmul_rn(v[k], share.weights[k]), step);
        if (turner.keys && PAIRS) {
#pragma unroll
            for (int o = 0; o < OCTETS; o++)
                if (share.e + 8 * o < HEAD_DIM) store_octet(turned + share.beside * HEAD_DIM + share.e + 8 * o, v + 8 * o);
            __syncwarp();
        }
#pragma unroll
        for (int o = 0; o < OCTETS; o++) {
            const int e = share.e + 8 * o;
            if (!on || e >= HEAD_DIM) continue;
            float x[8];
#pragma unroll
            for (int k = 0; k < 8; k++) x[k] = v[8 * o + k];
            turn<false>(turner, e, t, x, whole);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                x[k] = __fadd_rn(fminf(fmaxf(x[k], -largest), largest), 0.f);
                if (SCALES) x[k] = __fdiv_rn(x[k], scale);
            }
            vector.keep(e, x);
        }
        if (turner.keys && PAIRS) __syncwarp();
    }
};

__device__ __forceinline__ void restore_tokens(const Restored& restored, const Share& share, const Mean& mean,
                                               float* turned, const u16* staged, int lane) {
    const int tokens = restored.job.tokens;
#pragma unroll 1
    for (int first = 0; first < tokens; first += VECTORS) {
        const int t = first + share.beside;
        float v[HELD];
#pragma unroll
        for (int o = 0; o < OCTETS; o++) {
#pragma unroll
            for (int k = 0; k < 8; k++) v[8 * o + k] = 0.f;
            if (t < tokens && share.e + 8 * o < HEAD_DIM)
                fetch_octet(restored.job, restored.run, staged, share.e + 8 * o, t, v + 8 * o);
        }
        restored.keep(v, share, mean, turned, t, t < tokens, lane);
    }
}

// Do what restore_tokens does, if abreast is ABREAST: a thread reads eight elements of ABREAST tokens at once.
template <int ABREAST>
__device__ __forceinline__ void restore_octets(const Restored& restored, const Share& share, const Mean& mean, float* turned,
                                               int lane) {
    const Wht& job = restored.job;
    const Run& run = restored.run;
    const uint4* row = (const uint4*)(restored.job.rounded + ((i64)run.row * job.n + run.block) * restored.job.row_room);
#pragma unroll 1
    for (int first = 0; first < job.streams; first += VECTORS) {
        const int stream = first + share.beside;
        const bool on = stream < job.streams && share.e < HEAD_DIM;
        const uint4* from = row + octet_at(job, run.head, share.e, stream, ABREAST);
        u32 words[ABREAST][4];
#pragma unroll
        for (int i = 0; i < ABREAST; i++) {
            const uint4 four = on ? from[i * job.streams] : make_uint4(0, 0, 0, 0);
            words[i][0] = four.x, words[i][1] = four.y, words[i][2] = four.z, words[i][3] = four.w;
        }
#pragma unroll
        for (int i = 0; i < ABREAST; i++) {
            float v[HELD];
#pragma unroll
            for (int k = 0; k < HELD; k++) {
                const int place = (k * ABREAST + i) % (8 * ABREAST);
                v[k] = on ? number_of(words[place / 8][place % 8 / 2] >> 16 * (place % 2)) : 0.f;
            }
            restored.keep(v, share, mean, turned, stream + i * job.streams, on, lane);
        }
    }
}

// Restore all runs of good blocks from `rounded` into the paged cache.
extern "C" __global__ void __launch_bounds__(256, 3) restore_rows(const Wht job) {
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    float *mean_x = (float*)shared + warp * (1 + VECTORS) * HEAD_DIM, *turned = mean_x + HEAD_DIM;
    u16* staged = (u16*)((float*)shared + warps * (1 + VECTORS) * HEAD_DIM) + warp * job.tokens * SHORT_STRIDE;
    const Mean mean{mean_x};
    const Share share(lane);
    for (u32 i = blockIdx.x * warps + warp; i < (u32)(KINDS * job.layers * job.n * job.heads); i += gridDim.x * warps) {
        const Run run(job, i);
        if (job.status[run.block] != GOOD) continue;
        const Restored restored(job, run);
        __syncwarp();
        restored.fetch_mean(mean_x, lane);
        if (job.abreast == 1) restore_octets<1>(restored, share, mean, turned, lane);
        else if (job.abreast == 2) restore_octets<2>(restored, share, mean, turned, lane);
        else if (job.abreast == 4) restore_octets<4>(restored, share, mean, turned, lane);
        else {
            if (job.staged) stage(job, run, staged, lane);
            restore_tokens(restored, share, mean, turned, staged, lane);
        }
    }
}
