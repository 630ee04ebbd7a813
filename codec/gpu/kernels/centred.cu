// Sections in form 1: vectors by manthan.codec.centred, one head of one layer of one block by a warp. Its arithmetic, but
// for the order in which a mean's sum is taken, which nobody has to know to decode it. With CENTRED_MEANS 0 keys have no
// mean, and are coded as values are.
//
// Elements are in the order of the pairs' first numbers, their second ones, and the others; i of them is in v[i / 32].

#define MEAN_TOP ((1 << (MEAN_BITS - 1)) - 1)
#define LIMIT_BITS ((127u + 100) << 23)
#define STEP_END ((127 + 100 + 2) << 7)
#define SCALE_MAX 0xfef
#define SCALE_END 0xff0

struct Centred {  // where the parts of a section are; of this run
    u8 *steps, *means, *scales, *planes;

    __device__ __forceinline__ Centred(const Sections& job, const Run& run, u8* section) {
        const i64 runs = (i64)job.layers * job.heads, index = run.layer * job.heads + run.head;
        const int bits = run.kind ? VALUE_BITS : KEY_BITS, width = job.tokens * bits * (HEAD_DIM / 8);
        u8* at = section + START_NBYTES;
        steps = at + 2 * index;
        if (CENTRED_MEANS && run.kind == 0) at += align16(2 * runs);
        means = at + MEAN_BITS * (HEAD_DIM / 8) * index;
        if (CENTRED_MEANS && run.kind == 0) at += align16(MEAN_BITS * (HEAD_DIM / 8) * runs);
        scales = at + (1 + job.tokens) * index;
        at += align16((1 + job.tokens) * runs);
        planes = at + width * index;
        if (index + 1 == runs) {  // its end is its part's, and there are zeros behind it
            tails[0] = steps + 2, tails[1] = means + MEAN_BITS * (HEAD_DIM / 8);
            tails[2] = scales + 1 + job.tokens, tails[3] = planes + width;
        } else {
            for (int i = 0; i < 4; i++) tails[i] = 0;
        }
        begin = section + START_NBYTES;
    }
    __device__ __forceinline__ void fill(int kind, int lane) const {
        for (int i = CENTRED_MEANS ? 2 * kind : 2; i < 4; i++)
            if (tails[i] && lane < (-(tails[i] - begin) & 15)) tails[i][lane] = 0;
    }

private:
    u8 *tails[4], *begin;
};

struct Turner {  // of element i of a token's vector by its place
    const Sections& job;
    const float* cosines;
    bool keys;

    __device__ __forceinline__ int source(int i) const {  // where element i is in a vector
        if (!keys || !INTERLEAVED || i >= 2 * PAIRS) return i;
        return i < PAIRS ? 2 * i : 2 * (i - PAIRS) + 1;
    }
    __device__ __forceinline__ int pair(int i) const { return i < PAIRS ? i : i - PAIRS; }
    __device__ __forceinline__ bool turns(int i) const { return keys && i < 2 * PAIRS; }
    __device__ __forceinline__ int partner(int i) const { return i < PAIRS ? i + PAIRS : i - PAIRS; }
    __device__ __forceinline__ float cosine(int i, int t) const { return cosines[t * PAIRS + pair(i)]; }
    __device__ __forceinline__ float sine(int i, int t) const {  // as it goes with element i
        float sine = cosines[(job.block_tokens + t) * PAIRS + pair(i)];
        return i < PAIRS ? -sine : sine;
    }
    __device__ __forceinline__ float turned(const float* mean, int i, int t) const {
        if (!turns(i)) return mean[i];
        return __fadd_rn(__fmul_rn(mean[i], cosine(i, t)), __fmul_rn(mean[partner(i)], sine(i, t)));
    }
};

// The mean that its codes stand for, into shared memory.
__device__ __forceinline__ void decode_mean(u32 step, const u8* planes, float* mean, int lane) {
    for (int i = lane; i < HEAD_DIM; i += 32) {
        int code = 0;
        for (int p = 0; p < MEAN_BITS; p++) code = code << 1 | (planes[p * (HEAD_DIM / 8) + i / 8] >> (i % 8) & 1);
        float magnitude = (code & MEAN_TOP) * f(step << 16);
        mean[i] = code > MEAN_TOP ? -magnitude : magnitude;
    }
    __syncwarp();
}

#if CENTRED_MEANS
// The mean, in shared memory, and its codes. Returns whether no key is too large, or else leaves the first that is.
__device__ __forceinline__ bool encode_mean(const Sections& job, const Run& run, const Turner& turner,
                                            const Centred& parts, float* mean, int lane) {
    float sum[ROWS], largest = 0.f;
    int bad = job.tokens;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int i = 32 * r + lane;
        sum[r] = 0.f;
        for (int t = 0; i < HEAD_DIM && t < job.tokens; t++) {
            const Word* x = run.x + t * job.token_stride;
            float number = load(x + turner.source(i));
            if ((b(number) & 0x7fffffffu) >= LIMIT_BITS) bad = min(bad, t);
            if (turner.turns(i))
                number = number * turner.cosine(i, t) - load(x + turner.source(turner.partner(i))) * turner.sine(i, t);
            sum[r] += number;
        }
        sum[r] *= 1.f / job.tokens;
        largest = fmaxf(largest, fabsf(sum[r]));
    }
    bad = __reduce_min_sync(FULL, bad);
    if (bad < job.tokens) {
        if (lane == 0) atomicMin(job.status + run.block, (run.layer * job.heads + run.head) * job.tokens + bad);
        return false;
    }
    u32 step = bf16_bits(b(f(__reduce_max_sync(FULL, b(largest))) * (1.f / MEAN_TOP)));
    if (step < 1 << 7) step = 0;
    float width = f(step << 16);
    if (lane == 0) *(u16*)parts.steps = step;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int i = 32 * r + lane, code = step ? __float2int_rn(sum[r] / width) : 0;
        code = min(max(code, -MEAN_TOP), MEAN_TOP);
        if (i < HEAD_DIM) mean[i] = code * width;
        int bits = abs(code) | (code < 0 ? MEAN_TOP + 1 : 0);
#pragma unroll
        for (int p = 0; p < MEAN_BITS; p++) {
            u32 word = __ballot_sync(FULL, bits >> (MEAN_BITS - 1 - p) & 1);
            if (lane < 4 && 4 * r + lane < HEAD_DIM / 8) parts.means[p * (HEAD_DIM / 8) + 4 * r + lane] = word >> (8 * lane);
        }
    }
    __syncwarp();
    return true;
}
#endif

template <int BITS>
__device__ __forceinline__ void encode_tokens(const Sections& job, const Run& run, const Turner& turner,
                                              const Centred& parts, const float* mean, float* sums, int lane) {
    // words of this row are of no use: room for scales until the largest is known
    u16* scales = job.words + ((i64)run.row * job.n + run.block) * job.room + run.head * job.tokens;
    float v[ROWS];
    for (int t = 0; t < job.tokens; t++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            int i = 32 * r + lane;
            v[r] = i < HEAD_DIM ? load(run.x + t * job.token_stride + turner.source(i)) : 0.f;
            if (turner.keys && i < HEAD_DIM) v[r] = __fsub_rn(v[r], turner.turned(mean, i, t));
        }
        if (!encode_numbers<BITS>(v, (u8*)(scales + t), parts.planes + t * BITS * (HEAD_DIM / 8), lane, sums) && lane == 0)
            atomicMin(job.status + run.block, (run.layer * job.heads + run.head) * job.tokens + t);
    }
    __syncwarp();
    int largest = 0;
    for (int t = lane; t < job.tokens; t += 32) largest = max(largest, min((scales[t] + 4) >> 3, SCALE_MAX));
    int octave = max((int)__reduce_max_sync(FULL, largest) >> 4, 15) - 15;
    if (lane == 0) parts.scales[0] = octave;
    for (int t = lane; t < job.tokens; t += 32)
        parts.scales[1 + t] = max(min((scales[t] + 4) >> 3, SCALE_MAX) - 16 * octave, 0);
}

// Returns whether its scales are finite; else nothing is written.
template <int BITS>
__device__ __forceinline__ bool decode_tokens(const Sections& job, const Run& run, const Turner& turner,
                                              const Centred& parts, const float* mean, int lane) {
    int octave = parts.scales[0], largest = 0;
    for (int t = lane; t < job.tokens; t += 32) largest = max(largest, (int)parts.scales[1 + t]);
    largest = __reduce_max_sync(FULL, largest);
    if (largest && 16 * octave + largest >= SCALE_END) return false;
    float v[ROWS];
    for (int t = 0; t < job.tokens; t++) {
        int scale = parts.scales[1 + t] ? (16 * octave + parts.scales[1 + t]) << 3 : 0;
        decode_numbers<BITS>((u32)scale << 16, parts.planes + t * BITS * (HEAD_DIM / 8), v, lane);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            int i = 32 * r + lane;
            if (i >= HEAD_DIM) continue;
            if (turner.keys) v[r] = __fadd_rn(v[r], turner.turned(mean, i, t));
            float x = __fadd_rn(fminf(fmaxf(v[r], -f(LARGEST)), f(LARGEST)), 0.f);
            run.x[t * job.token_stride + turner.source(i)] = store(x);
        }
    }
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS) encode_centred(const Sections job) {
    __shared__ float means[WARPS][HEAD_DIM], sums[WARPS][64];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    EACH_RUN(job, i) {
        const Run run(job, i);
        if (job.forms[2 * run.block + run.kind] != CENTRED) continue;
        u8* section = job.codes + job.offsets[run.block] + job.starts[2 * run.block + run.kind];
        const Turner turner{job, run.cosines(job), CENTRED_MEANS && run.kind == 0};
        const Centred parts(job, run, section);
        __syncwarp();
        parts.fill(run.kind, lane);
        if (run.kind) encode_tokens<VALUE_BITS>(job, run, turner, parts, means[warp], sums[warp], lane);
#if CENTRED_MEANS
        else if (encode_mean(job, run, turner, parts, means[warp], lane))
#else
        else
#endif
            encode_tokens<KEY_BITS>(job, run, turner, parts, means[warp], sums[warp], lane);
    }
}

// A status becomes the first vector of a run whose mean or a scale of which is not finite.
extern "C" __global__ void __launch_bounds__(THREADS) decode_centred(const Sections job) {
    __shared__ float means[WARPS][HEAD_DIM];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    EACH_RUN(job, i) {
        const Run run(job, i);
        if (job.status[run.block] != GOOD || job.forms[2 * run.block + run.kind] != CENTRED) continue;
        u8* section = job.codes + job.offsets[run.block] + job.starts[2 * run.block + run.kind];
        const Turner turner{job, run.cosines(job), CENTRED_MEANS && run.kind == 0};
        const Centred parts(job, run, section);
        float* mean = means[warp];
        bool good = true;
        __syncwarp();
        if (run.kind == 0) {
#if CENTRED_MEANS
            u32 step = *(const u16*)parts.steps;
            good = step < STEP_END;
            decode_mean(step, parts.means, mean, lane);
#endif
            good = good && decode_tokens<KEY_BITS>(job, run, turner, parts, mean, lane);
        } else {
            good = decode_tokens<VALUE_BITS>(job, run, turner, parts, mean, lane);
        }
        if (!good && lane == 0)
            atomicMin(job.status + run.block, (run.layer * job.heads + run.head) * job.tokens);
    }
}
