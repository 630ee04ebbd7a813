// Tiles of 8 vectors (tokens of one head) by one warp, the rotation on the tensor cores: each Hadamard block of it is
// H(16 n) = H(16) x H(n), the first factor by mma.m16n8k16 over 8 vectors at a time, the second by butterflies between accumulators of one thread. The inputs
// of those products are exact in 16 bits (a bf16 or fp16 vector, +-1; or a level as the sum of two fp16) and the sums are
// float32, so that only the order of additions differs from vector.cu.

#if FAST
// Thread 4 g + t holds of B, the 16 x 8 operand whose columns are vectors: rows 2t, 2t + 1 (b0) and 2t + 8, 2t + 9 (b1)
// of column g; and of the product: rows g (c0, c1) and g + 8 (c2, c3) of columns 2t and 2t + 1.

#define CHUNKS (HEAD_DIM / 16)  // the n of H(16 n)
#define RUN (HEAD_DIM / 8)      // elements, or bits of a plane, that are next to each other in one thread

#if DTYPE == 1
#define ONE 0x3c00u
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#define MMA_K8 "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
#else
#define ONE 0x3f80u
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#define MMA_K8 "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32"
#endif
#define MMA_F16 "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"

#define PRODUCT(OP, c, a, b0, b1)                                                                                    \
    asm volatile(OP " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                         \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

#define PRODUCT_K8(c, a0, a1, b0)                                                                                    \
    asm volatile(MMA_K8 " {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"                                              \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                    \
                 : "r"(a0), "r"(a1), "r"(b0))

// A pair of +-1 in 16 bits: the sign of the first, and whether the second differs from it.
__device__ __forceinline__ u32 ones(u32 one, int minus, int differ) {
    return one * 0x10001u ^ (minus & 1 ? 0x80008000u : 0u) ^ (differ ? 0x80000000u : 0u);
}

// The Hadamard block that begins at element E: the sizes of blocks are the powers of two that add up to HEAD_DIM, the
// largest first. All blocks smaller than 64 are in the last byte of a thread's bits.
template <int E>
struct Block {
    static constexpr int SIZE = HEAD_DIM - E >= 256 ? 256 : HEAD_DIM - E >= 128 ? 128 : HEAD_DIM - E >= 64 ? 64
                              : HEAD_DIM - E >= 32 ? 32 : 16;
    static constexpr int CHUNK = E / 16, COUNT = SIZE / 16;  // its chunks
    static constexpr int PIECE = SIZE / 8;                   // of its elements, next to each other in one thread
    static constexpr int NEXT = E + SIZE;
    static constexpr bool LAST = NEXT == HEAD_DIM;
};
#define LARGEST_BLOCK Block<0>::SIZE

// The factors H(n) of all blocks, between a thread's accumulators.
template <int E = 0>
__device__ __forceinline__ void butterflies(float (&c)[CHUNKS][4]) {
    using B = Block<E>;
#pragma unroll
    for (int stride = 1; stride < B::COUNT; stride *= 2)
#pragma unroll
        for (int j = B::CHUNK; j < B::CHUNK + B::COUNT; j++)
            if (!(j - B::CHUNK & stride))
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    float low = c[j][k], high = c[j + stride][k];
                    c[j][k] = low + high;
                    c[j + stride][k] = low - high;
                }
    if constexpr (!B::LAST) butterflies<B::NEXT>(c);
}

// What is missing to make the numbers of smaller blocks as large as those of the largest.
template <int E = 0>
__device__ __forceinline__ void even_out(float (&c)[CHUNKS][4]) {
    using B = Block<E>;
    constexpr int ratio = LARGEST_BLOCK / B::SIZE;
    constexpr float root = ratio == 1 ? 1.f : ratio == 2 ? 1.41421356f : ratio == 4 ? 2.f : ratio == 8 ? 2.82842712f : 4.f;
    if constexpr (ratio > 1)
#pragma unroll
        for (int j = B::CHUNK; j < B::CHUNK + B::COUNT; j++)
#pragma unroll
            for (int k = 0; k < 4; k++) c[j][k] *= root;
    if constexpr (!B::LAST) even_out<B::NEXT>(c);
}

// Of two numbers of this thread, one is kept, and the other added to what the thread `mask` away keeps of it.
__device__ __forceinline__ float halve(float zero, float one, int mask, int lane) {
    bool keeps_one = lane & mask;
    return (keeps_one ? one : zero) + __shfl_xor_sync(FULL, keeps_one ? zero : one, mask);
}

// Element e of a block: bit 0 is row bit 0 of B, the bits above it the chunk, the three highest rows' bits t and 3.
// Row g + 8 i of chunk j's product is element PIECE g + 2 j + i of the transformed block.
struct Encoder {
    u32 a[4], flip[2][CHUNKS];

    __device__ __forceinline__ Encoder(int lane) {
        int g = lane >> 2, t = lane & 3;
        for (int i = 0; i < 4; i++) a[i] = ones(ONE, __popc(g & (t + 4 * (i >> 1))), i & 1), pin(a[i]);
        find_flips<0>(t);
    }

private:
    template <int E>
    __device__ __forceinline__ void find_flips(int t) {
        using B = Block<E>;
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int j = 0; j < B::COUNT; j++) {
                int e = E + B::PIECE * (t + 4 * k) + 2 * j;
                u32 two = SIGNS[e / 32] >> (e % 32);
                flip[k][B::CHUNK + j] = (two & 1) << 15 | (two & 2) << 30;
                pin(flip[k][B::CHUNK + j]);
            }
        if constexpr (!B::LAST) find_flips<B::NEXT>(t);
    }
};

struct Piece {  // a thread's share of its vector: two runs of each block
    u32 w[2][CHUNKS];

    template <int E = 0>
    __device__ __forceinline__ void fetch(const Word* x, int lane) {
        using B = Block<E>;
        int t = lane & 3;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const Word* from = x + E + B::PIECE * (t + 4 * k);
            u32* to = w[k] + B::CHUNK;
            if constexpr (B::SIZE == 16) {
                to[0] = __ldg((const u32*)from);
            } else if constexpr (B::SIZE == 32) {
                uint2 two = __ldg((const uint2*)from);
                to[0] = two.x, to[1] = two.y;
            } else {
#pragma unroll
                for (int i = 0; i < B::COUNT / 4; i++) {
                    uint4 four = __ldg((const uint4*)from + i);
                    to[4 * i] = four.x, to[4 * i + 1] = four.y, to[4 * i + 2] = four.z, to[4 * i + 3] = four.w;
                }
            }
        }
        if constexpr (!B::LAST) fetch<B::NEXT>(x, lane);
    }
};

__device__ __forceinline__ float quotient(float x, float y) {
    float z;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
__device__ __forceinline__ float square_root(float x) { float y; asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// c becomes the product, norm the squared norms of this thread's two vectors: the diagonal of X transposed times X. Its
// left operand is two registers next to each other, as they were loaded; with the first of them as the right operand,
// rows 0 to 7 of the result are of use, with the second rows 8 to 15.
__device__ __forceinline__ void transform(const Encoder& encoder, const Piece& piece, float (&c)[CHUNKS][4],
                                          float (&norm)[2], int lane) {
    float first[4] = {0.f, 0.f, 0.f, 0.f}, second[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
        c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0.f;
        PRODUCT(MMA, c[j], encoder.a, piece.w[0][j] ^ encoder.flip[0][j], piece.w[1][j] ^ encoder.flip[1][j]);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            if (j % 2 == 0) PRODUCT_K8(first, piece.w[k][j], j + 1 < CHUNKS ? piece.w[k][j + 1] : 0u, piece.w[k][j]);
            else PRODUCT_K8(second, piece.w[k][j - 1], piece.w[k][j], piece.w[k][j]);
        }
    }
    float own = lane & 4 ? first[1] + second[3] : first[0] + second[2];  // thread 4 n + n / 2 has vector n's
    int source = 9 * (lane & 3);
    norm[0] = __shfl_sync(FULL, own, source);
    norm[1] = __shfl_sync(FULL, own, source + 4);
}

__device__ __forceinline__ float is_above(float x, float y) {
    float flag;
    asm("set.gt.f32.f32 %0, %1, %2;" : "=f"(flag) : "f"(x), "f"(y));
    return flag;
}

// What quantizing a thread's part of a vector gives: a bit of each plane for each element, and sums for the scale.
template <int BITS>
struct Part {
    u32 plane[BITS];
    float dot, square;

    // Element e of the part is at v + 2 (e % 2) of chunk e / 2. Integer instructions are what there is least of, so bits
    // are set by adding powers of two to a float, GROUP at a time: 2**23 keeps them the low bits of the mantissa.
    __device__ __forceinline__ void quantize(const float (&c)[CHUNKS][4], int v, float rms) {
        const int cuts = (1 << (BITS - 1)) - 1, groups = (RUN + 22) / 23, GROUP = RUN / groups;
        float cut[cuts], sum = 0.f, above[cuts], set[cuts][groups];
        u32 over[cuts], minus = 0;
#pragma unroll
        for (int k = 0; k < cuts; k++) {
            cut[k] = cut_at<BITS>(k) * rms, above[k] = 0.f;
#pragma unroll
            for (int i = 0; i < groups; i++) set[k][i] = 8388608.f;
        }
#pragma unroll
        for (int e = RUN - 1; e >= 0; e--) {
            float y = c[e / 2][v + 2 * (e % 2)], magnitude = fabsf(y);
            const float bit = (float)(1 << e % GROUP);
            minus = __funnelshift_l(b(y), minus, 1);
            sum += magnitude;
#pragma unroll
            for (int k = 0; k < cuts; k++) count(magnitude, cut[k], bit, set[k][e / GROUP], above[k]);
        }
#pragma unroll
        for (int k = 0; k < cuts; k++) {
            over[k] = b(set[k][0]) & (1u << GROUP) - 1;
            if constexpr (groups == 2) over[k] |= b(set[k][1]) << GROUP;
        }
        plane[0] = minus;
        dot = level<BITS>(0) * sum;
        square = RUN * level<BITS>(0) * level<BITS>(0);
        // The level is a staircase: each cut that is passed adds a step to it, and to its square.
#pragma unroll
        for (int k = 0; k < cuts; k++) {
            const float low = level<BITS>(k), high = level<BITS>(k + 1);
            dot = fmaf(high - low, above[k], dot);
            square = fmaf(high * high - low * low, (float)__popc(over[k]), square);
        }
#pragma unroll
        for (int p = 1; p < BITS; p++) {  // bit p of a count of passed cuts: the parity of every 2**p-th cut
            plane[p] = 0;
#pragma unroll
            for (int k = (1 << (BITS - 1 - p)) - 1; k < cuts; k += 1 << (BITS - 1 - p)) plane[p] ^= over[k];
        }
    }

private:
    // 1 or 0 instead of a predicate: compilers keep dozens of those in registers, bit by bit, when they move comparisons
    // ahead.
    __device__ __forceinline__ static void count(float magnitude, float cut, float bit, float& set, float& above) {
        const float flag = is_above(magnitude, cut);
        set = fmaf(flag, bit, set);
        above = fmaf(flag, magnitude, above);
    }
};

// A plane's bits by all threads of a vector, into the tile's codes in shared memory: those of the blocks of 64 and more,
// whole bytes.
template <int BITS, int E = 0>
__device__ __forceinline__ void keep_bytes(const Part<BITS>& part, u8* vector, int g) {
    using B = Block<E>;
    if constexpr (B::SIZE >= 64) {
        u8* to = vector + E / 8 + g * (B::PIECE / 8);
#pragma unroll
        for (int p = 0; p < BITS; p++) {
            u32 bits = part.plane[p] >> E / 8;
            if constexpr (B::SIZE == 64) to[p * (HEAD_DIM / 8)] = (u8)bits;
            else if constexpr (B::SIZE == 128) *(u16*)(to + p * (HEAD_DIM / 8)) = (u16)bits;
            else *(u32*)(to + p * (HEAD_DIM / 8)) = bits;
        }
        if constexpr (!B::LAST) keep_bytes<BITS, B::NEXT>(part, vector, g);
    }
}

// The byte that holds a thread's bits of the smaller blocks, of all planes next to each other.
template <int BITS>
__device__ __forceinline__ u32 small_bits(const Part<BITS>& part) {
    const u32 at = HEAD_DIM / 64;  // of the byte
    u32 two = __byte_perm(part.plane[0], part.plane[1], at | (at + 4) << 4);
    if constexpr (BITS == 2) return two;
    else if constexpr (BITS == 3) return __byte_perm(two, part.plane[2], 0x0010 | (at + 4) << 8);
    else return __byte_perm(two, __byte_perm(part.plane[2], part.plane[3], at | (at + 4) << 4), 0x5410);
}

// Those into the tile's codes: neighbours have swapped, so that `even` and `odd` are of one vector and of threads g and g + 1.
template <int BITS>
__device__ __forceinline__ void keep_small(u32 even, u32 odd, u8* vector, int g) {
    const u32 nibbles = 0x0f0f0f0fu, pairs = 0x03030303u;
    if constexpr (HEAD_DIM & 32) {
        u8* to = vector + HEAD_DIM / 64 * 8 + (g >> 1);
        const u32 bytes = even & nibbles | (odd & nibbles) << 4;
#pragma unroll
        for (int p = 0; p < BITS; p++) to[p * (HEAD_DIM / 8)] = (u8)(bytes >> 8 * p);
        even >>= 4, odd >>= 4;
    }
    if constexpr (HEAD_DIM & 16) {
        u8* to = vector + HEAD_DIM / 32 * 4 + (g >> 2);
        const u32 four = even & pairs | (odd & pairs) << 2, other = __shfl_xor_sync(FULL, four, 8);
        const u32 bytes = g & 2 ? other | four << 4 : four | other << 4;  // two threads write the same
#pragma unroll
        for (int p = 0; p < BITS; p++) to[p * (HEAD_DIM / 8)] = (u8)(bytes >> 8 * p);
    }
}

// The tile's codes out of shared memory.
template <int BITS>
__device__ __forceinline__ void leave_codes(const uint4* tile, u8* planes, int valid, int lane) {
    const int width = BITS * (HEAD_DIM / 8);
    if constexpr (WHOLE) {
#pragma unroll
        for (int i = 0; i < width / 2; i += 32)
            if (i + lane < width / 2) ((uint4*)planes)[i + lane] = tile[i + lane];
    } else {
        for (int i = lane; i < valid * (width / 2); i += 32) ((u16*)planes)[i] = ((const u16*)tile)[i];
    }
}

// Encode 8 transformed vectors, `valid` of which exist; returns a bit for each that needs encode_vector. tile: for their
// codes, in shared memory.
template <int BITS>
__device__ __forceinline__ u32 encode_tile(float (&c)[CHUNKS][4], const float (&norm)[2], u8* scales, u8* planes,
                                           int valid, uint4* tile, int lane) {
    int g = lane >> 2, t = lane & 3, odd = g & 1;
    butterflies(c);
    even_out(c);
    Part<BITS> part[2];
    part[0].quantize(c, 0, square_root(norm[0]) * f(RMS));
    part[1].quantize(c, 1, square_root(norm[1]) * f(RMS));
    const int width = BITS * (HEAD_DIM / 8);
    u8* vectors = (u8*)tile + 2 * t * width;
    __syncwarp();
    keep_bytes<BITS>(part[0], vectors, g);
    keep_bytes<BITS>(part[1], vectors + width, g);
    if constexpr (HEAD_DIM % 64) {
        u32 zero = small_bits(part[0]), one = small_bits(part[1]), own = odd ? one : zero;
        u32 other = __shfl_xor_sync(FULL, odd ? zero : one, 4);
        keep_small<BITS>(odd ? other : own, odd ? own : other, vectors + odd * width, g);
    }
    __syncwarp();
    leave_codes<BITS>(tile, planes, valid, lane);
    // Thread g < 2 ends with the scale of vector 2t + g.
    float dot = halve(part[0].dot, part[1].dot, 4, lane), own = odd ? norm[1] : norm[0], scale;
    if constexpr (UNBIASED) {
        dot += __shfl_xor_sync(FULL, dot, 8);
        dot += __shfl_xor_sync(FULL, dot, 16);
        scale = quotient(own * LARGEST_BLOCK, dot) * f(BLOCK_ROOT);  // the squared norm of what was coded, and of the vector
    } else {
        float square = halve(part[0].square, part[1].square, 4, lane), sum = halve(dot, square, 8, lane);
        sum += __shfl_xor_sync(FULL, sum, 16);
        scale = quotient(sum, __shfl_xor_sync(FULL, sum, 8)) * f(BLOCK_ROOT);
    }
    if (g < 2 && 2 * t + g < valid) *(u16*)(scales + 4 * t + 2 * g) = min(bf16_bits(b(scale)), 0x7f7fu);
    u32 slow = (own > 1e-20f && own < 1e30f ? 0u : 1u) << (2 * t + odd);
    return __reduce_or_sync(FULL, slow) & ((1u << valid) - 1);
}

// Element e of a block of 64 and more: bits 2 and 3 are row bits 0 and 3 of B, the two highest are t, the others the
// chunk: a plane word's nibbles then turn into lookups (prmt) of four elements at a time. Row g + 8 i of chunk j's product
// is the element with bit 2 = i, bit 3 = g & 1, the two highest = g >> 1, and the others those of j. Of a block of 32 bit 0
// is row bit 0 and i, bit 2 row bit 3 and g & 1, bit 1 the chunk; of 16 bit 0 is row bit 0 and i, bit 1 row bit 3 and g & 1.

struct Decoder {
    u32 a[4], flip[CHUNKS];

    __device__ __forceinline__ Decoder(int lane) {
        int g = lane >> 2, t = lane & 3;
        for (int i = 0; i < 4; i++) a[i] = ones(0x3c00u, __popc((g >> 1) & t) + (g & (i >> 1)), i & 1), pin(a[i]);
        find_flips<0>(g);
    }

private:
    template <int E>
    __device__ __forceinline__ void find_flips(int g) {
        using B = Block<E>;
#pragma unroll
        for (int i = 0; i < B::COUNT; i++) {
            int e = B::SIZE < 64 ? B::PIECE * g + 2 * i : 8 * (g & 1) + B::SIZE / 4 * (g >> 1) + 16 * (i / 4) + 2 * (i % 4);
            u32 two = SIGNS[(E + e) / 32] >> ((E + e) % 32);
            flip[B::CHUNK + i] = ONE * 0x10001u | (two & 1) << 15 | (two & 2) << 30;
            pin(flip[B::CHUNK + i]);
        }
        if constexpr (!B::LAST) find_flips<B::NEXT>(g);
    }
};

#define WORDS (HEAD_DIM / 128 + (HEAD_DIM % 128 >= 64) + (HEAD_DIM % 64 >= 32) + (HEAD_DIM % 32 >= 16))  // of a plane

template <int BITS>
struct Packed {  // a thread's share of vector g's planes, and the scales of its two output vectors
    u32 w[BITS][WORDS], scales;

    __device__ __forceinline__ void fetch(const u8* from_scales, const u8* from_planes, int valid, int lane) {
        int g = lane >> 2, t = lane & 3;
        fetch_words<0, 0>(from_planes + min(g, valid - 1) * (BITS * (HEAD_DIM / 8)), t);
        if (WHOLE && 2 * t + 1 < valid) scales = *(const u32*)(from_scales + 4 * t);
        else if (2 * t + 1 < valid) scales = ((const u16*)from_scales)[2 * t] | (u32)((const u16*)from_scales)[2 * t + 1] << 16;
        else scales = 2 * t < valid ? *(const u16*)(from_scales + 4 * t) : 0u;
    }

private:
    template <int E, int WORD>
    __device__ __forceinline__ void fetch_words(const u8* vector, int t) {
        using B = Block<E>;
        const u8* at = vector + E / 8 + (B::SIZE == 16 ? t >> 1 : t * (B::SIZE / 32));
#pragma unroll
        for (int p = 0; p < BITS; p++, at += HEAD_DIM / 8) {
            if constexpr (B::SIZE == 16) w[p][WORD] = *at >> 4 * (t & 1) & 15;
            else if constexpr (B::SIZE == 32) w[p][WORD] = *at;
            else if constexpr (B::SIZE == 64) w[p][WORD] = *(const u16*)at;
            else
#pragma unroll
                for (int i = 0; i < B::SIZE / 128; i++) w[p][WORD + i] = *(const u32*)(at + 4 * i);
        }
        if constexpr (!B::LAST) fetch_words<B::NEXT, WORD + (B::SIZE + 127) / 128>(vector, t);
    }
};

// The bits of a plane word at positions 4 i + b, as bit p of nibble i.
__device__ __forceinline__ u32 spread(u32 word, int b, int p) {
    return (b > p ? word >> (b - p) : word << (p - b)) & (0x11111111u << p);
}

// A byte's bits, or four, as bit p of nibbles in the order in which small blocks look them up.
template <int SIZE>
__device__ __forceinline__ u32 deposit(u32 bits, int p) {
    if constexpr (SIZE == 32) {  // those with bit 1 in the upper half
        bits = bits & 0x33 | (bits & 0xcc) << 14;
        bits = (bits | bits << 4) & 0x03030303u;
    } else {
        bits = (bits | bits << 6) & 0x0303u;
    }
    return ((bits | bits << 3) & 0x11111111u) << p;
}

// Four levels by the nibbles of `code`, as two pairs of fp16: their high and low bytes are looked up apart.
template <int BITS>
__device__ __forceinline__ void look_up(int part, u32 code, u32 minus, u32& pair0, u32& pair1) {
    const u32* table = BITS == 2 ? HALVES_2[part] : BITS == 3 ? HALVES_3[part] : HALVES_4[part];
    u32 low = __byte_perm(table[0], table[1], code), high = __byte_perm(table[2], table[3], code);
    if (BITS == 4) high ^= minus;
    pair0 = __byte_perm(low, high, 0x5140);
    pair1 = __byte_perm(low, high, 0x7362);
}

// Two numbers rounded to the cache's dtype, times +-1; adding 0 leaves no -0.
__device__ __forceinline__ u32 pair_of(float low, float high, u32 flip) {
    u32 pair;
#if DTYPE == 1
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(flip), "r"(0));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(flip), "r"(0));
#endif
    return pair;
}

// Sums of the levels of four elements, by the lowest 16 bits of `code`.
template <int BITS>
__device__ __forceinline__ void look_up_chunk(const Decoder& decoder, u32 code, u32 sign, float (&to)[4]) {
    u32 minus = BITS == 4 ? __byte_perm(0x8000u, 0u, sign) : 0u, b0, b1;
    to[0] = to[1] = to[2] = to[3] = 0.f;
    look_up<BITS>(0, code, minus, b0, b1);
    PRODUCT(MMA_F16, to, decoder.a, b0, b1);
    look_up<BITS>(1, code, minus, b0, b1);
    PRODUCT(MMA_F16, to, decoder.a, b0, b1);
}

template <int BITS, int E = 0, int WORD = 0>
__device__ __forceinline__ void look_up_all(const Decoder& decoder, const Packed<BITS>& packed, float (&c)[CHUNKS][4]) {
    using B = Block<E>;
    if constexpr (B::SIZE >= 64) {
#pragma unroll
        for (int i = 0; i < (B::SIZE + 127) / 128; i++)
#pragma unroll
            for (int bit = 0; bit < 4; bit++) {
                u32 code = spread(packed.w[BITS - 1][WORD + i], bit, 0) | spread(packed.w[BITS - 2][WORD + i], bit, 1);
                if constexpr (BITS > 2) code |= spread(packed.w[BITS - 3][WORD + i], bit, 2);
                u32 sign = BITS == 4 ? spread(packed.w[0][WORD + i], bit, 0) : 0u;
#pragma unroll
                for (int half = 0; half < (B::SIZE == 64 ? 1 : 2); half++)
                    look_up_chunk<BITS>(decoder, code >> 16 * half, sign >> 16 * half, c[B::CHUNK + bit + 4 * half + 8 * i]);
            }
    } else {
        u32 code = deposit<B::SIZE>(packed.w[BITS - 1][WORD], 0) | deposit<B::SIZE>(packed.w[BITS - 2][WORD], 1);
        if constexpr (BITS > 2) code |= deposit<B::SIZE>(packed.w[BITS - 3][WORD], 2);
        u32 sign = BITS == 4 ? deposit<B::SIZE>(packed.w[0][WORD], 0) : 0u;
#pragma unroll
        for (int half = 0; half < B::COUNT; half++)
            look_up_chunk<BITS>(decoder, code >> 16 * half, sign >> 16 * half, c[B::CHUNK + half]);
    }
    if constexpr (!B::LAST) look_up_all<BITS, B::NEXT, WORD + (B::SIZE + 127) / 128>(decoder, packed, c);
}

// A thread's numbers of vector v, out of accumulators, to where the vector begins.
template <int E = 0>
__device__ __forceinline__ void leave_vector(const Decoder& decoder, const float (&c)[CHUNKS][4], int v, float scale,
                                             Word* vector, int g) {
    using B = Block<E>;
    const float (*y)[4] = c + B::CHUNK;
    const u32* flip = decoder.flip + B::CHUNK;
    const float factor = scale * f(ROOTS[E / 16]);
    if constexpr (B::SIZE >= 64) {
        Word* to = vector + E + 8 * (g & 1) + B::SIZE / 4 * (g >> 1);
#pragma unroll
        for (int h = 0; h < B::COUNT / 4; h++, y += 4, flip += 4) {
            uint4 eight;
            eight.x = pair_of(y[0][v] * factor, y[1][v] * factor, flip[0]);
            eight.y = pair_of(y[2][v] * factor, y[3][v] * factor, flip[1]);
            eight.z = pair_of(y[0][v + 2] * factor, y[1][v + 2] * factor, flip[2]);
            eight.w = pair_of(y[2][v + 2] * factor, y[3][v + 2] * factor, flip[3]);
            *(uint4*)(to + 16 * h) = eight;
        }
    } else if constexpr (B::SIZE == 32) {
        u32 low = pair_of(y[0][v] * factor, y[0][v + 2] * factor, flip[0]);
        *(uint2*)(vector + E + 4 * g) = make_uint2(low, pair_of(y[1][v] * factor, y[1][v + 2] * factor, flip[1]));
    } else {
        *(u32*)(vector + E + 2 * g) = pair_of(y[0][v] * factor, y[0][v + 2] * factor, flip[0]);
    }
    if constexpr (!B::LAST) leave_vector<B::NEXT>(decoder, c, v, scale, vector, g);
}

// Decode 8 vectors, `valid` of which exist; returns a bit for each whose scale is not finite or may overflow.
template <int BITS>
__device__ __forceinline__ u32 decode_tile(const Decoder& decoder, const Packed<BITS>& packed, Word* x, int stride,
                                           int valid, int lane) {
    int g = lane >> 2, t = lane & 3;
    float c[CHUNKS][4];
    look_up_all<BITS>(decoder, packed, c);
    butterflies(c);
    u32 slow = 0;
#pragma unroll
    for (int v = 0; v < 2; v++) {
        float scale = f(v ? packed.scales & 0xffff0000u : packed.scales << 16);
        // No sum exceeds 2.74 HEAD_DIM: beyond this scale the result may be too large for its dtype.
        if (!(fabsf(scale) < (DTYPE == 1 ? 1400.f : 1e34f))) slow |= 1u << (2 * t + v);
        if (2 * t + v < valid) leave_vector(decoder, c, v, scale, x + (2 * t + v) * stride, g);
    }
    return __reduce_or_sync(FULL, slow) & ((1u << valid) - 1);
}
#else
struct Encoder {
    __device__ __forceinline__ Encoder(int) {}
};
typedef Encoder Decoder;
#endif
