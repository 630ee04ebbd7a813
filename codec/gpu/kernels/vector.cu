// One vector by one warp: any head size, rotated or not, whatever the numbers. The order of all float operations is that of
// manthan.codec.base, bit for bit.

#define ROWS ((HEAD_DIM + 31) / 32)  // element 32 r + lane is in v[r]

__device__ __forceinline__ void hadamard(float (&v)[ROWS], int lane) {
    if (!ROTATED) return;
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

// Returns whether the vector is finite; of one that is not, nothing is written. v: 0 behind the vector's end; overwritten.
template <int BITS>
__device__ __forceinline__ bool encode_numbers(float (&v)[ROWS], u8* scale, u8* planes, int lane, float* sums) {
    const int levels = 1 << (BITS - 1);
    float q[ROWS], t[ROWS];
    u32 top = 0;
#pragma unroll
    for (int r = 0; r < ROWS; r++) top = max(top, b(v[r]) & 0x7fffffffu);
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
        bool minus = v[r] < 0.f;
        v[r] = fabsf(v[r]);
        int k = 0;
        q[r] = level<BITS>(0);
#pragma unroll
        for (int c = 1; c < levels; c++)
            if (v[r] > __fmul_rn(cut_at<BITS>(c - 1), rms)) {
                k = c;
                q[r] = level<BITS>(c);
            }
        int code = k | (minus ? levels : 0);
#pragma unroll
        for (int p = 0; p < BITS; p++) {
            u32 word = __ballot_sync(FULL, code >> (BITS - 1 - p) & 1);
            if (lane < 4 && 4 * r + lane < HEAD_DIM / 8) planes[p * (HEAD_DIM / 8) + 4 * r + lane] = word >> (8 * lane);
        }
        t[r] = __fmul_rn(v[r], q[r]);
        q[r] = __fmul_rn(q[r], q[r]);
    }
    float dot = fold(t, lane, sums);
    float ratio = UNBIASED ? __fdiv_rn(norm, fmaxf(dot, f(0x00800000u))) : __fdiv_rn(dot, fold(q, lane, sums));
    u32 rounded = min(bf16_bits(b(__fmul_rn(ratio, inverse))), 0x7f7fu);
    if (lane < 2) scale[lane] = rounded >> (8 * lane);
    return true;
}

template <int BITS>
__device__ __noinline__ bool encode_vector(const Word* x, u8* scale, u8* planes, int lane, float* sums) {
    float v[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) v[r] = 32 * r + lane < HEAD_DIM ? load(x + 32 * r + lane) : 0.f;
    return encode_numbers<BITS>(v, scale, planes, lane, sums);
}

// scale: the bits of a finite float.
template <int BITS>
__device__ __forceinline__ void decode_numbers(u32 scale, const u8* planes, float (&v)[ROWS], int lane) {
    const int levels = 1 << (BITS - 1);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int i = 32 * r + lane, code = 0;
        v[r] = 0.f;
        if (i < HEAD_DIM) {
#pragma unroll
            for (int p = 0; p < BITS; p++) code = code << 1 | (planes[p * (HEAD_DIM / 8) + i / 8] >> (i % 8) & 1);
            float magnitude = level<BITS>(code & (levels - 1));
            v[r] = code & levels ? -magnitude : magnitude;
        }
    }
    hadamard(v, lane);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int i = 32 * r + lane;
        float y = i < HEAD_DIM ? __fmul_rn(__fmul_rn(v[r], f(WEIGHTS[i])), f(scale)) : 0.f;
        v[r] = __fadd_rn(fminf(fmaxf(y, -f(LARGEST)), f(LARGEST)), 0.f);  // adding 0 leaves no -0
    }
}

// Returns whether the scale is finite; with one that is not, nothing is written.
template <int BITS>
__device__ __noinline__ bool decode_vector(const u8* scale, const u8* planes, Word* x, int lane) {
    u32 bits = (u32)scale[0] << 16 | (u32)scale[1] << 24;
    if ((bits & EXPONENT) == EXPONENT) return false;
    float v[ROWS];
    decode_numbers<BITS>(bits, planes, v, lane);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (32 * r + lane < HEAD_DIM) x[32 * r + lane] = store(v[r]);
    return true;
}
