// manthan.codec.k3v3: one vector (a key or value) by one warp. Float operations have the CPU's order, for equal bits.
// LEVELS (magnitudes) and CUTS (thresholds between levels) come from Python, as bits of floats.

#define BITS 3
#define MAGNITUDES 4
#define VECTOR_NBYTES (BITS * (HEAD_DIM / 8))
#define ROWS ((HEAD_DIM + 31) / 32)  // element 32 r + lane is in v[r]

__device__ __forceinline__ void hadamard(float (&v)[ROWS], int lane) {
#pragma unroll
    for (int stride = 1; stride < 32; stride *= 2) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float other = __shfl_xor_sync(FULL, v[r], stride);
            int i = 32 * r + lane;
            if (i < HEAD_DIM && BLOCK_SIZE_OF[i] > stride)
                v[r] = lane & stride ? __fsub_rn(other, v[r]) : __fadd_rn(v[r], other);
        }
    }
#pragma unroll
    for (int stride = 1; stride < ROWS; stride *= 2) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (!(r & stride) && (r | stride) < ROWS && BLOCK_SIZE_OF[32 * r] > 32 * stride) {
                float low = v[r], high = v[r | stride];
                v[r] = __fadd_rn(low, high);
                v[r | stride] = __fsub_rn(low, high);
            }
        }
    }
}

__device__ __forceinline__ float fold(const float (&v)[ROWS], int lane, float* sums) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float x = v[r];
        x = __fadd_rn(x, __shfl_down_sync(FULL, x, 4, 8));
        x = __fadd_rn(x, __shfl_down_sync(FULL, x, 2, 8));
        x = __fadd_rn(x, __shfl_down_sync(FULL, x, 1, 8));
        if (lane % 8 == 0 && 32 * r + lane < HEAD_DIM) sums[4 * r + lane / 8] = x;
    }
    __syncwarp();
    for (int n = HEAD_DIM / 8; n > 1; n = (n + 1) / 2) {
        int half = (n + 1) / 2;
        if (lane < n - half) sums[lane] = __fadd_rn(sums[lane], sums[half + lane]);
        __syncwarp();
    }
    float total = sums[0];
    __syncwarp();
    return total;
}

// Return true if the vector is finite; else write nothing.
__device__ __forceinline__ bool encode_vector(const Word* x, u8* scale, u8* planes, int lane, float* sums) {
    float v[ROWS], t[ROWS];
    u32 top = 0;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        v[r] = 32 * r + lane < HEAD_DIM ? load(x + 32 * r + lane) : 0.f;
        top = max(top, b(v[r]) & 0x7fffffffu);
    }
    top = __reduce_max_sync(FULL, top);
    if (top >= EXPONENT) return false;
    u32 field = (u32)max(254 - (int)(top >> 23), 8);
    float factor = f(field << 23), inverse = field < 254 ? f((254 - field) << 23) : f(1u << 22);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int i = 32 * r + lane;
        v[r] = i < HEAD_DIM ? __fmul_rn(__fmul_rn(v[r], factor), f(WEIGHTS[i])) : 0.f;
    }
    hadamard(v, lane);
#pragma unroll
    for (int r = 0; r < ROWS; r++) t[r] = __fmul_rn(v[r], v[r]);
    float norm = fold(t, lane, sums), rms = __fmul_rn(__fsqrt_rn(norm), f(ROOT));
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float size = fabsf(v[r]);
        int k = 0;
#pragma unroll
        for (int c = 0; c < MAGNITUDES - 1; c++) k += size > __fmul_rn(f(CUTS[c]), rms);
        int code = k | (v[r] < 0.f ? MAGNITUDES : 0);
#pragma unroll
        for (int p = 0; p < BITS; p++) {
            u32 word = __ballot_sync(FULL, code >> (BITS - 1 - p) & 1);
            if (lane < 4 && 4 * r + lane < HEAD_DIM / 8) planes[p * (HEAD_DIM / 8) + 4 * r + lane] = word >> (8 * lane);
        }
        t[r] = __fmul_rn(size, f(LEVELS[k]));
    }
    float ratio = __fdiv_rn(norm, fmaxf(fold(t, lane, sums), f(0x00800000u)));
    u32 rounded = min(bf16_bits(b(__fmul_rn(ratio, inverse))), 0x7f7fu);
    if (lane < 2) scale[lane] = rounded >> (8 * lane);
    return true;
}

// Return true if the scale is finite; else write nothing.
__device__ __forceinline__ bool decode_vector(const u8* scale, const u8* planes, Word* x, int lane) {
    u32 bits = (u32)scale[0] << 16 | (u32)scale[1] << 24;
    if ((bits & EXPONENT) == EXPONENT) return false;
    float v[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int i = 32 * r + lane, code = 0;
        v[r] = 0.f;
        if (i < HEAD_DIM) {
#pragma unroll
            for (int p = 0; p < BITS; p++) code = code << 1 | (planes[p * (HEAD_DIM / 8) + i / 8] >> (i % 8) & 1);
            float magnitude = f(LEVELS[code & (MAGNITUDES - 1)]);
            v[r] = code & MAGNITUDES ? -magnitude : magnitude;
        }
    }
    hadamard(v, lane);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int i = 32 * r + lane;
        if (i >= HEAD_DIM) continue;
        float y = __fmul_rn(__fmul_rn(v[r], f(WEIGHTS[i])), f(bits));
        x[i] = store(__fadd_rn(fminf(fmaxf(y, -f(LARGEST)), f(LARGEST)), 0.f));  // adding 0 leaves no -0
    }
    return true;
}

struct Vector {  // vector `i` of a launch: index in its KV block's keys or values, addresses in cache and encoded block
    int block, index;
    Word* x;
    u8 *scale, *planes;

    __device__ __forceinline__ Vector(const Job& job, u32 i) {
        const u32 vectors = job.layers * job.heads * job.tokens;
        const int kind = i / vectors % job.kinds, layer = i % vectors / (job.heads * job.tokens);
        const int head = i / job.tokens % job.heads, token = i % job.tokens;
        index = i % vectors, block = i / vectors / job.kinds;
        x = (Word*)job.caches[layer] + job.block_ids[block] * job.block_stride + job.at[kind];
        x += head * job.head_stride + token * job.token_stride;
        u8* buffer = job.buffer + job.offsets[block] + job.payload[kind];
        scale = buffer + 2 * index;
        planes = buffer + (2ll * vectors + 15) / 16 * 16 + (i64)index * VECTOR_NBYTES;
    }
};

#define EACH_VECTOR(job, i)                                                                                    \
    for (u32 i = blockIdx.x * WARPS + threadIdx.x / 32; i < (u32)(job.n * job.kinds * job.layers * job.heads * job.tokens); \
         i += gridDim.x * WARPS)

// status: GOOD before; becomes the least index, among a KV block's keys or values, of a vector that is not finite.
extern "C" __global__ void __launch_bounds__(THREADS) encode(const Job job) {
    __shared__ float sums[WARPS][64];
    EACH_VECTOR(job, i) {
        const Vector vector(job, i);
        const int lane = threadIdx.x % 32;
        if (!encode_vector(vector.x, vector.scale, vector.planes, lane, sums[threadIdx.x / 32]) && lane == 0)
            atomicMin(job.status + vector.block, vector.index);
    }
}

// KV blocks with status below 0 are left alone. A status becomes the least index of a vector with a non-finite scale.
extern "C" __global__ void __launch_bounds__(THREADS) decode(const Job job) {
    EACH_VECTOR(job, i) {
        const Vector vector(job, i);
        const int lane = threadIdx.x % 32;
        if (*(volatile int*)(job.status + vector.block) < 0) continue;
        if (!decode_vector(vector.scale, vector.planes, vector.x, lane) && lane == 0)
            atomicMin(job.status + vector.block, vector.index);
    }
}
