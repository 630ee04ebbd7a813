// Between paged blocks and the vectors that a matrix multiplies: all heads of a token of a layer, keys turned back to
// place 0. `gather` leaves (x - mean) * gain, which times the profile's transform are the numbers to round; `scatter`
// takes numbers times the transform's inverse, and leaves those * gain + mean. A warp takes what a head of one row and
// block has: of as many tokens at once as it has lanes for, two pairs of numbers a lane.

#define QUADS (HEAD_DIM / 4)
#define ABREAST (QUADS < 32 ? 32 / QUADS : 1)  // tokens

struct __align__(2 * sizeof(Word)) Words {
    Word x, y;
};
struct __align__(4) Halves {
    Half x, y;
};

// Two neighbouring pairs: numbers 0 and 1 are turned together, and 2 and 3. They are two and two next to each other but
// for halves of an odd length.
struct Quad {
    int at[4], pair;
    bool apart, beside, turned[2];

    __device__ __forceinline__ Quad(const Sections& job, int kind, int quad) : pair(2 * quad) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            bool halves = pair + i < PAIRS && !INTERLEAVED;
            at[2 * i] = halves ? pair + i : 2 * (pair + i);
            at[2 * i + 1] = halves ? pair + i + PAIRS : 2 * (pair + i) + 1;
            turned[i] = kind == 0 && pair + i < PAIRS;
        }
        apart = pair < PAIRS && !INTERLEAVED;
        beside = PAIRS % 2 == 0 || INTERLEAVED || !apart;
    }
    // From and to where a vector begins: T is what a number is there, Two are two of them.
    template <typename Two, typename T>
    __device__ __forceinline__ void fetch(const T* vector, T (&x)[4], bool aligned) const {
        if (aligned && beside) {
            Two one = *(const Two*)(vector + at[0]), other = *(const Two*)(vector + (apart ? at[1] : at[2]));
            x[0] = one.x, x[1] = apart ? other.x : one.y, x[2] = apart ? one.y : other.x, x[3] = other.y;
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = vector[at[i]];
        }
    }
    template <typename Two, typename T>
    __device__ __forceinline__ void leave(T* vector, const T (&x)[4], bool aligned) const {
        if (aligned && beside) {
            *(Two*)(vector + at[0]) = Two{x[0], apart ? x[2] : x[1]};
            *(Two*)(vector + (apart ? at[1] : at[2])) = Two{apart ? x[1] : x[2], x[3]};
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) vector[at[i]] = x[i];
        }
    }
    // By the place of token t, or back from it.
    template <bool BACK>
    __device__ __forceinline__ void turn(const Sections& job, const float* cosines, int t, float (&x)[4]) const {
        if (!turned[0] && !turned[1]) return;
        const float scale = BACK ? 1.f / job.rope_scale : job.rope_scale;
        const float *cosine = cosines + t * PAIRS + pair, *sine = cosine + job.block_tokens * PAIRS;
        float2 c, s;
        if constexpr (PAIRS % 2 == 0) c = *(const float2*)cosine, s = *(const float2*)sine;
        else c = {cosine[0], turned[1] ? cosine[1] : 0.f}, s = {sine[0], turned[1] ? sine[1] : 0.f};
        half_turn<BACK>(c.x * scale, s.x * scale, x[0], x[1]);
        if (turned[1]) half_turn<BACK>(c.y * scale, s.y * scale, x[2], x[3]);
    }
    template <bool BACK>
    __device__ __forceinline__ static void half_turn(float c, float s, float& first, float& second) {
        const float one = first;
        if (BACK) s = -s;
        first = one * c - second * s;
        second = second * c + one * s;
    }
};

// A status becomes the first vector that is not finite, or whose numbers do not fit into fp16.
extern "C" __global__ void __launch_bounds__(THREADS, 2) gather(const Sections job) {
    const int lane = threadIdx.x % 32, beside = QUADS < 32 ? lane / QUADS : 0;
    EACH_RUN(job, i) {
        const Run run(job, i);
        const float* cosines = run.cosines(job);
        Half* out = job.vectors + run.vector(job);
        int bad = job.tokens;
        for (int q = QUADS < 32 ? lane % QUADS : lane; q < QUADS && beside < ABREAST; q += 32) {
            const Quad quad(job, run.kind, q);
            float mean[4], gain[4];
            quad.fetch<float2>(job.mean + run.column(job), mean, true);
            quad.fetch<float2>(job.gain + run.column(job), gain, true);
#pragma unroll 4
            for (int t = beside; t < job.tokens; t += ABREAST) {
                Word words[4];
                float x[4];
                Half halves[4];
                quad.fetch<Words>(run.x + t * job.token_stride, words, ALIGNED);
                u32 largest = 0;
#pragma unroll
                for (int k = 0; k < 4; k++) x[k] = load(words + k), largest = max(largest, b(x[k]) & 0x7fffffffu);
                if (largest >= EXPONENT) bad = min(bad, t);
                quad.turn<true>(job, cosines, t, x);
                float most = 0.f;
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    x[k] = (x[k] - mean[k]) * gain[k];
                    halves[k] = narrow(x[k]);
                    most = fmaxf(most, fabsf(x[k]));
                }
                if (!(most < 65504.f)) bad = min(bad, t);
                quad.leave<Halves>(out + (i64)t * components(job), halves, true);
            }
        }
        bad = __reduce_min_sync(FULL, bad);
        if (lane == 0 && bad < job.tokens)
            atomicMin(job.status + run.block, (run.layer * job.heads + run.head) * job.tokens + bad);
    }
}

// Of good blocks.
extern "C" __global__ void __launch_bounds__(THREADS, 2) scatter(const Sections job) {
    const int lane = threadIdx.x % 32, beside = QUADS < 32 ? lane / QUADS : 0;
    EACH_RUN(job, i) {
        const Run run(job, i);
        if (job.status[run.block] != GOOD) continue;
        const u32 doublings = job.doublings[2 * run.block + run.kind];
        const float larger = f((127u + doublings / 2) << 23), still = f((127u + (doublings + 1) / 2) << 23);
        const float *cosines = run.cosines(job), *back = job.back + run.vector(job);
        for (int q = QUADS < 32 ? lane % QUADS : lane; q < QUADS && beside < ABREAST; q += 32) {
            const Quad quad(job, run.kind, q);
            float mean[4], gain[4];
            quad.fetch<float2>(job.mean + run.column(job), mean, true);
            quad.fetch<float2>(job.gain + run.column(job), gain, true);
#pragma unroll
            for (int k = 0; k < 4; k++) gain[k] *= larger;
#pragma unroll 4
            for (int t = beside; t < job.tokens; t += ABREAST) {
                float x[4];
                Word words[4];
                quad.fetch<float2>(back + (i64)t * components(job), x, true);
#pragma unroll
                for (int k = 0; k < 4; k++) x[k] = x[k] * still * gain[k] + mean[k];
                quad.turn<false>(job, cosines, t, x);
#pragma unroll
                for (int k = 0; k < 4; k++) words[k] = store(fminf(fmaxf(x[k], -f(LARGEST)), f(LARGEST)));
                quad.leave<Words>(run.x + t * job.token_stride, words, ALIGNED);
            }
        }
    }
}
