// Between paged blocks and the vectors that a matrix multiplies: all heads of a token of a layer, keys turned back to
// place 0. `gather` leaves (x - mean) * gain, which times the profile's transform are the numbers to round; `scatter`
// takes numbers times the transform's inverse, and leaves those * gain + mean. A warp takes what a head of one row and
// block has: of as many tokens at once as it has lanes for, two pairs of numbers a lane.

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
