// Vectors in registers: a thread holds 8 or 16 neighbouring numbers, and a warp as many vectors as fit. Float operations
// have the order of manthan.codec.wht, so that results are equal bit for bit.

// RoPE of a token's vector. Elements are numbered so that the first numbers of all pairs come first, then the second
// numbers, then numbers that RoPE leaves as they are.
struct Turner {
    const Sections& job;
    const float* cosines;
    bool keys;  // values are not rotated

    __device__ __forceinline__ int source(int i) const {  // index of element i in the cache's vector
        if (!keys || !INTERLEAVED || i >= 2 * PAIRS) return i;
        return i < PAIRS ? 2 * i : 2 * (i - PAIRS) + 1;
    }
};

#define HELD (HEAD_DIM <= 256 ? 8 : 16)  // numbers that a thread holds
#define OCTETS (HELD / 8)
#define HOLDERS ((HEAD_DIM + HELD - 1) / HELD)
#define SPAN (HOLDERS <= 4 ? 4 : HOLDERS <= 8 ? 8 : HOLDERS <= 16 ? 16 : 32)  // threads of a vector, perhaps some idle
#define VECTORS (32 / SPAN)

__device__ __forceinline__ void load_octet(const float* from, float (&x)[8]) {
    float4 low = ((const float4*)from)[0], high = ((const float4*)from)[1];
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}
__device__ __forceinline__ void store_octet(float* to, const float* x) {
    ((float4*)to)[0] = make_float4(x[0], x[1], x[2], x[3]);
    ((float4*)to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

#if DTYPE == 0
__device__ __forceinline__ u32 store_pair(float low, float high) {  // of finite numbers
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#elif DTYPE == 1
__device__ __forceinline__ u32 store_pair(float low, float high) { return store(low) | (u32)store(high) << 16; }
#endif

struct Vector {  // in the cache, read and written by element index; see Turner
    const Turner& turner;
    Word* x;

    __device__ __forceinline__ float one(int i) const { return load(x + turner.source(i)); }
    __device__ __forceinline__ bool whole(int e) const {  // true if e to e + 7 are aligned neighbours in the cache
        return ALIGNED && !(INTERLEAVED && turner.keys && e < 2 * PAIRS);
    }
    __device__ __forceinline__ void octet(int e, float (&y)[8]) const {
        if (!whole(e)) {
#pragma unroll
            for (int k = 0; k < 8; k++) y[k] = one(e + k);
            return;
        }
#if DTYPE == 2
        load_octet((const float*)(x + e), y);
#elif DTYPE > 2
        const uint2 words = *(const uint2*)(x + e);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            Word word = (k < 4 ? words.x : words.y) >> 8 * (k % 4);
            y[k] = load(&word);
        }
#else
        uint4 words = *(const uint4*)(x + e);
        const u32 four[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int k = 0; k < 8; k++) {
            Word word = four[k / 2] >> 16 * (k % 2);
            y[k] = load(&word);
        }
#endif
    }
    __device__ __forceinline__ void keep(int e, const float (&y)[8]) const {
        if (!whole(e)) {
#pragma unroll
            for (int k = 0; k < 8; k++) x[turner.source(e + k)] = store(y[k]);
            return;
        }
#if DTYPE == 2
        store_octet((float*)(x + e), y);
#elif DTYPE > 2
        u32 two[2] = {0, 0};
#pragma unroll
        for (int k = 0; k < 8; k++) two[k / 4] |= (u32)store(y[k]) << 8 * (k % 4);
        *(uint2*)(x + e) = make_uint2(two[0], two[1]);
#else
        u32 four[4];
#pragma unroll
        for (int k = 0; k < 4; k++) four[k] = store_pair(y[2 * k], y[2 * k + 1]);
        *(uint4*)(x + e) = make_uint4(four[0], four[1], four[2], four[3]);
#endif
    }
};

struct Mean {  // of keys, or one key, in shared memory, by element index
    const float* x;

    __device__ __forceinline__ float one(int i) const { return x[i]; }
    __device__ __forceinline__ void octet(int e, float (&y)[8]) const { load_octet(x + e, y); }
};

// Rotate elements e to e + 7 of a key by the angles of token t, or back. vector: has the other number of each pair.
template <bool BACK, typename From>
__device__ __forceinline__ void turn(const Turner& turner, int e, int t, float (&x)[8], const From& vector) {
    const Sections& job = turner.job;
    if (!turner.keys || e >= 2 * PAIRS) return;
    const float *cosines = turner.cosines + t * PAIRS, *sines = cosines + job.block_tokens * PAIRS;
#if PAIRS % 8 == 0
    const bool second = e >= PAIRS;
    const int place = second ? e - PAIRS : e;
    float other[8], c[8], s[8];
    load_octet(cosines + place, c);
    load_octet(sines + place, s);
    vector.octet(second ? place : place + PAIRS, other);
#pragma unroll
    for (int k = 0; k < 8; k++)
        x[k] = __fadd_rn(__fmul_rn(x[k], c[k]), __fmul_rn(other[k], second == BACK ? -s[k] : s[k]));
#else
#pragma unroll
    for (int k = 0; k < 8; k++) {
        if (e + k >= 2 * PAIRS) continue;
        const bool second = e + k >= PAIRS;
        const int place = second ? e + k - PAIRS : e + k;
        float other = vector.one(second ? place : place + PAIRS), s = second == BACK ? -sines[place] : sines[place];
        x[k] = __fadd_rn(__fmul_rn(x[k], cosines[place]), __fmul_rn(other, s));
    }
#endif
}

struct Share {  // part of a vector that a thread holds
    int beside, e, block;  // index of the vector in the warp; first element; size of the Hadamard matrix over it
    bool head;             // true if it is the vector's first part
    float weights[HELD];

    __device__ __forceinline__ Share(int lane) : beside(lane / SPAN), e(lane % SPAN * HELD), head(lane % SPAN == 0) {
        block = e < HEAD_DIM ? BLOCK_SIZE_OF[e] : 0;
#pragma unroll
        for (int k = 0; k < HELD; k++) weights[k] = e + k < HEAD_DIM ? f(WEIGHTS[e + k]) : 0.f;
    }
    __device__ __forceinline__ bool joins(int stride) const {  // true if the element `stride` away is in the same Hadamard block
        return (HEAD_DIM & (HEAD_DIM - 1)) == 0 || block > stride;
    }
};

__device__ __forceinline__ void hadamard(float (&v)[HELD], const Share& share, int lane) {
#pragma unroll
    for (int stride = 1; stride < HELD; stride *= 2)
#pragma unroll
        for (int k = 0; k < HELD; k++)
            if (!(k & stride) && (stride < 8 || share.joins(stride))) {
                float low = v[k], high = v[k | stride];
                v[k] = __fadd_rn(low, high);
                v[k | stride] = __fsub_rn(low, high);
            }
#pragma unroll
    for (int stride = HELD; stride < HEAD_DIM; stride *= 2) {
        const float sign = lane & stride / HELD ? -1.f : 1.f;
        const bool joins = share.joins(stride);
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            float other = __shfl_xor_sync(FULL, v[k], stride / HELD);
            if (joins) v[k] = __fmaf_rn(v[k], sign, other);
        }
    }
}

__device__ __forceinline__ float fold(const float (&s)[8]) {
    return __fadd_rn(__fadd_rn(__fadd_rn(s[0], s[4]), __fadd_rn(s[2], s[6])),
                     __fadd_rn(__fadd_rn(s[1], s[5]), __fadd_rn(s[3], s[7])));
}

// Sum of v * w over a vector, in the order that manthan.codec.base defines; right in the vector's first thread only.
__device__ __forceinline__ float product(const float (&v)[HELD], const float (&w)[HELD], int lane) {
    float sums[OCTETS];
#pragma unroll
    for (int o = 0; o < OCTETS; o++) {
        float s[8];
#pragma unroll
        for (int k = 0; k < 8; k++) s[k] = __fmul_rn(v[8 * o + k], w[8 * o + k]);
        sums[o] = fold(s);
    }
#pragma unroll
    for (int n = HEAD_DIM / 8; n > 1; n = (n + 1) / 2) {  // result i is in sums[i % OCTETS] of thread i / OCTETS
        const int half = (n + 1) / 2, lower = half / OCTETS, upper = (half + 1) / OCTETS;
        float others[OCTETS];
#pragma unroll
        for (int o = 0; o < OCTETS; o++)
            others[o] = __shfl_down_sync(FULL, sums[(o + half) % OCTETS], (o + half % OCTETS) / OCTETS ? upper : lower);
#pragma unroll
        for (int o = 0; o < OCTETS; o++)
            if (lane % SPAN * OCTETS + o < n - half) sums[o] = __fadd_rn(sums[o], others[o]);
    }
    return sums[0];
}
