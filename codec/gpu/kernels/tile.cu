// Tiles of 8 vectors (tokens of one head) by one warp, the rotation on the tensor cores: H(16 n) = H(16) x H(n), the first
// factor by mma.m16n8k16 over 8 vectors at a time, the second by butterflies between accumulators of one thread. The inputs
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

// The factor H(n), between a thread's accumulators.
__device__ __forceinline__ void butterflies(float (&c)[CHUNKS][4]) {
#pragma unroll
    for (int stride = 1; stride < CHUNKS; stride *= 2)
#pragma unroll
        for (int j = 0; j < CHUNKS; j++)
            if (!(j & stride))
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    float low = c[j][k], high = c[j | stride][k];
                    c[j][k] = low + high;
                    c[j | stride][k] = low - high;
                }
}

// Of two numbers of this thread, one is kept, and the other added to what the thread `mask` away keeps of it.
__device__ __forceinline__ float halve(float zero, float one, int mask, int lane) {
    bool keeps_one = lane & mask;
    return (keeps_one ? one : zero) + __shfl_xor_sync(FULL, keeps_one ? zero : one, mask);
}

// Element e of a vector: bit 0 is row bit 0 of B, the bits above it the chunk, the three highest rows' bits t and 3.
// Row g + 8 i of chunk j's product is element RUN g + 2 j + i of the transformed vector.
struct Encoder {
    u32 a[4], flip[2][CHUNKS];

    __device__ __forceinline__ Encoder(int lane) {
        int g = lane >> 2, t = lane & 3;
        for (int i = 0; i < 4; i++) a[i] = ones(ONE, __popc(g & (t + 4 * (i >> 1))), i & 1);
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int j = 0; j < CHUNKS; j++) {
                int e = RUN * (t + 4 * k) + 2 * j;
                u32 two = SIGNS[e / 32] >> (e % 32);
                flip[k][j] = (two & 1) << 15 | (two & 2) << 30;
            }
    }
};

struct Piece {  // a thread's share of its vector: two runs
    u32 w[2][CHUNKS];

    __device__ __forceinline__ void fetch(const Word* x, int lane) {
        int t = lane & 3;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const uint4* from = (const uint4*)(x + RUN * t + 4 * RUN * k);
#pragma unroll
            for (int i = 0; i < CHUNKS / 4; i++) {
                uint4 four = __ldg(from + i);
                w[k][4 * i] = four.x, w[k][4 * i + 1] = four.y, w[k][4 * i + 2] = four.z, w[k][4 * i + 3] = four.w;
            }
        }
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
            if (j % 2 == 0) PRODUCT_K8(first, piece.w[k][j], piece.w[k][j + 1], piece.w[k][j]);
            else PRODUCT_K8(second, piece.w[k][j - 1], piece.w[k][j], piece.w[k][j]);
        }
    }
    float own = lane & 4 ? first[1] + second[3] : first[0] + second[2];  // thread 4 n + n / 2 has vector n's
    int source = 9 * (lane & 3);
    norm[0] = __shfl_sync(FULL, own, source);
    norm[1] = __shfl_sync(FULL, own, source + 4);
}

// What quantizing a thread's part of a vector gives: a bit of each plane for each element, and sums for the scale.
template <int BITS>
struct Part {
    u32 plane[BITS];
    float dot, square;

    // Element e of the part is at v + 2 (e % 2) of chunk e / 2. Integer instructions are what there is least of, so bits
    // are set by adding powers of two to a float, 16 at a time: 2**23 keeps them the low bits of the mantissa.
    __device__ __forceinline__ void quantize(const float (&c)[CHUNKS][4], int v, float rms) {
        const int cuts = (1 << (BITS - 1)) - 1, groups = (RUN + 15) / 16;
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
            const float bit = (float)(1 << e % 16);
            minus = __funnelshift_l(b(y), minus, 1);
            sum += magnitude;
#pragma unroll
            for (int k = 0; k < cuts; k++)
                if (magnitude > cut[k]) set[k][e / 16] += bit, above[k] += magnitude;
        }
#pragma unroll
        for (int k = 0; k < cuts; k++) {
            over[k] = b(set[k][0]) & 0xffffu;
            if constexpr (groups == 2) over[k] |= b(set[k][1]) << 16;
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
};

// Encode 8 transformed vectors, `valid` of which exist; returns a bit for each that needs encode_vector.
template <int BITS>
__device__ __forceinline__ u32 encode_tile(float (&c)[CHUNKS][4], const float (&norm)[2], u8* scales, u8* planes,
                                           int valid, int lane) {
    int g = lane >> 2, t = lane & 3, odd = g & 1;
    butterflies(c);
    Part<BITS> part[2];
    part[0].quantize(c, 0, square_root(norm[0]));
    part[1].quantize(c, 1, square_root(norm[1]));
    const int width = BITS * HEAD_DIM / 8;
#pragma unroll
    for (int p = 0; p < BITS; p++) {
        u8* at = planes + p * (HEAD_DIM / 8);
        u32 zero = part[0].plane[p], one = part[1].plane[p];
        if constexpr (RUN == 32) {
            at += 2 * t * width + 4 * g;
            if (2 * t < valid) *(u32*)at = zero;
            if (2 * t + 1 < valid) *(u32*)(at + width) = one;
        } else {  // neighbours swap, so that each writes twice as much of one vector
            u32 other = __shfl_xor_sync(FULL, odd ? zero : one, 4);
            u32 both = odd ? other | one << RUN : zero | other << RUN;
            at += (2 * t + odd) * width + RUN / 4 * (g / 2);
            if (2 * t + odd < valid) {
                if constexpr (RUN == 16) *(u32*)at = both;
                else *(u16*)at = (u16)both;
            }
        }
    }
    // Thread g < 2 ends with the scale of vector 2t + g.
    float dot = halve(part[0].dot, part[1].dot, 4, lane), own = odd ? norm[1] : norm[0], scale;
    if constexpr (UNBIASED) {
        dot += __shfl_xor_sync(FULL, dot, 8);
        dot += __shfl_xor_sync(FULL, dot, 16);
        scale = quotient(own * HEAD_DIM, dot) * f(ROOT);  // the transformed vector's squared norm is HEAD_DIM times own
    } else {
        float square = halve(part[0].square, part[1].square, 4, lane), sum = halve(dot, square, 8, lane);
        sum += __shfl_xor_sync(FULL, sum, 16);
        scale = quotient(sum, __shfl_xor_sync(FULL, sum, 8)) * f(ROOT);
    }
    if (g < 2 && 2 * t + g < valid) *(u16*)(scales + 4 * t + 2 * g) = min(bf16_bits(b(scale)), 0x7f7fu);
    u32 slow = (own > 1e-20f && own < 1e30f ? 0u : 1u) << (2 * t + odd);
    return __reduce_or_sync(FULL, slow) & ((1u << valid) - 1);
}

// Element e: bits 2 and 3 are row bits 0 and 3 of B, the two highest are t, the others the chunk: a plane word's
// nibbles then turn into lookups (prmt) of four elements at a time. Row g + 8 i of chunk j's product is the element with
// bit 2 = i, bit 3 = g & 1, the two highest = g >> 1, and the others those of j.
#define WORDS ((HEAD_DIM + 127) / 128)  // plane words of a vector in one thread

struct Decoder {
    u32 a[4], flip[CHUNKS / 4][4];

    __device__ __forceinline__ Decoder(int lane) {
        int g = lane >> 2, t = lane & 3;
        for (int i = 0; i < 4; i++) a[i] = ones(0x3c00u, __popc((g >> 1) & t) + (g & (i >> 1)), i & 1);
#pragma unroll
        for (int h = 0; h < CHUNKS / 4; h++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int e = 8 * (g & 1) + 16 * h + HEAD_DIM / 4 * (g >> 1) + 2 * i;
                u32 two = SIGNS[e / 32] >> (e % 32);
                flip[h][i] = ONE * 0x10001u | (two & 1) << 15 | (two & 2) << 30;
            }
    }
};

template <int BITS>
struct Packed {  // a thread's share of vector g's planes, and the scales of its two output vectors
    u32 w[BITS][WORDS], scales;

    __device__ __forceinline__ void fetch(const u8* from_scales, const u8* from_planes, int valid, int lane) {
        int g = lane >> 2, t = lane & 3;
        const u8* at = from_planes + min(g, valid - 1) * (BITS * HEAD_DIM / 8) + t * (HEAD_DIM / 32);
#pragma unroll
        for (int p = 0; p < BITS; p++)
#pragma unroll
            for (int i = 0; i < WORDS; i++) {
                const u8* word = at + p * (HEAD_DIM / 8) + 4 * i;
                w[p][i] = HEAD_DIM == 64 ? *(const u16*)word : *(const u32*)word;
            }
        if (WHOLE && 2 * t + 1 < valid) scales = *(const u32*)(from_scales + 4 * t);
        else if (2 * t + 1 < valid) scales = ((const u16*)from_scales)[2 * t] | (u32)((const u16*)from_scales)[2 * t + 1] << 16;
        else scales = 2 * t < valid ? *(const u16*)(from_scales + 4 * t) : 0u;
    }
};

// The bits of a plane word at positions 4 i + b, as bit p of nibble i.
__device__ __forceinline__ u32 spread(u32 word, int b, int p) {
    return (b > p ? word >> (b - p) : word << (p - b)) & (0x11111111u << p);
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

// Decode 8 vectors, `valid` of which exist; returns a bit for each whose scale is not finite or may overflow.
template <int BITS>
__device__ __forceinline__ u32 decode_tile(const Decoder& decoder, const Packed<BITS>& packed, Word* x, int stride,
                                           int valid, int lane) {
    int g = lane >> 2, t = lane & 3;
    float c[CHUNKS][4];
#pragma unroll
    for (int i = 0; i < WORDS; i++)
#pragma unroll
        for (int bit = 0; bit < 4; bit++) {
            u32 code = spread(packed.w[BITS - 1][i], bit, 0) | spread(packed.w[BITS - 2][i], bit, 1);
            if constexpr (BITS > 2) code |= spread(packed.w[BITS - 3][i], bit, 2);
            u32 sign = BITS == 4 ? spread(packed.w[0][i], bit, 0) : 0u;
#pragma unroll
            for (int half = 0; half < (HEAD_DIM == 64 ? 1 : 2); half++) {
                float(&to)[4] = c[bit + 4 * half + 8 * i];
                u32 minus = BITS == 4 ? __byte_perm(0x8000u, 0u, sign >> 16 * half) : 0u;
                u32 b0, b1;
                to[0] = to[1] = to[2] = to[3] = 0.f;
                look_up<BITS>(0, code >> 16 * half, minus, b0, b1);
                PRODUCT(MMA_F16, to, decoder.a, b0, b1);
                look_up<BITS>(1, code >> 16 * half, minus, b0, b1);
                PRODUCT(MMA_F16, to, decoder.a, b0, b1);
            }
        }
    butterflies(c);
    u32 slow = 0;
#pragma unroll
    for (int v = 0; v < 2; v++) {
        float scale = f(v ? packed.scales & 0xffff0000u : packed.scales << 16);
        // No sum exceeds 2.74 HEAD_DIM: beyond this scale the result may be too large for its dtype.
        if (!(fabsf(scale) < (DTYPE == 1 ? 1400.f : 1e34f))) slow |= 1u << (2 * t + v);
        scale *= f(ROOT);
        if (2 * t + v < valid) {
            Word* to = x + (2 * t + v) * stride + 8 * (g & 1) + HEAD_DIM / 4 * (g >> 1);
#pragma unroll
            for (int h = 0; h < CHUNKS / 4; h++) {
                uint4 eight;
                eight.x = pair_of(c[4 * h][v] * scale, c[4 * h + 1][v] * scale, decoder.flip[h][0]);
                eight.y = pair_of(c[4 * h + 2][v] * scale, c[4 * h + 3][v] * scale, decoder.flip[h][1]);
                eight.z = pair_of(c[4 * h][v + 2] * scale, c[4 * h + 1][v + 2] * scale, decoder.flip[h][2]);
                eight.w = pair_of(c[4 * h + 2][v + 2] * scale, c[4 * h + 3][v + 2] * scale, decoder.flip[h][3]);
                *(uint4*)(to + 16 * h) = eight;
            }
        }
    }
    return __reduce_or_sync(FULL, slow) & ((1u << valid) - 1);
}
#else
struct Encoder {
    __device__ __forceinline__ Encoder(int) {}
};
typedef Encoder Decoder;
#endif
