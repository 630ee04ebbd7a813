// Headers and checksums of encoded blocks. A checksum is the xxh3-64 of an encoded block, less any refinements and less
// the checksum's own bytes. A thread block takes an encoded block.
//
// xxh3 keeps 8 sums of 64 bits. A stripe of 64 bytes adds to all of them; stripes 0 to 15 of a kibibyte do so with
// different parts of the secret, and then the sums are scrambled. Within a kibibyte the additions commute: a warp takes
// four stripes of a kibibyte at a time, and lane i adds to sum i % 8. The first warp scrambles sums of some kibibytes
// while the other warps add up the next ones.

// Constants of xxh3-64 without a seed. START: the sums at first. SECRET[s + i] is mixed with word i of stripe s of a
// kibibyte, and SECRET[16 + i] with sum i behind the kibibyte. LAST is mixed with the last 64 bytes, MERGE with the sums
// in the end.
__constant__ u64 START[8] = {
    0x00000000c2b2ae3dull, 0x9e3779b185ebca87ull, 0xc2b2ae3d27d4eb4full, 0x165667b19e3779f9ull,
    0x85ebca77c2b2ae63ull, 0x0000000085ebca77ull, 0x27d4eb2f165667c5ull, 0x000000009e3779b1ull};
__constant__ u64 SECRET[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull};
__constant__ u64 LAST[8] = {
    0xea647378d9c97e9full, 0xc5c3ebd33483acc5ull, 0x17eb6313faffa081ull, 0xd349daf0b751dd0dull,
    0x2b9e68d429265516ull, 0x8ffca1477d58be16ull, 0x45ce31d07ad1b8f8ull, 0xaf280416958f3acbull};
__constant__ u64 MERGE[8] = {
    0x6dd4de1cad21f72cull, 0xa44072db979083e9ull, 0xe679cb1f67b3b7a4ull, 0xd05a8278e5c0cc4eull,
    0x4608b82172ffcc7dull, 0x9035e08e2443f774ull, 0x52283c4c263a81e6ull, 0x65d088cb00c391bbull};
#define STRIPES 16
#define CHECKSUM_AT 8
#define EACH 4                          // kibibytes of a warp in a round
#define ROUND (EACH * (WARPS - 1))

__device__ __forceinline__ u64 shuffle_xor(u64 x, int mask) { return __shfl_xor_sync(FULL, x, mask); }

__device__ __forceinline__ u64 folded_product(u64 x, u64 y) { return x * y ^ __umul64hi(x, y); }

struct Whole {  // words of an encoded block with the checksum left out
    const u8* block;
    __device__ __forceinline__ u64 word(i64 i) const { return *(const u64*)(block + 8 * i + (i ? 8 : 0)); }
};

// Return the xxh3-64 of `length` bytes, a multiple of 8 above 240; only the first warp gets it. source: gives words.
template <typename Source>
__device__ u64 long_checksum(const Source& source, i64 length) {
    __shared__ u64 added[2][ROUND][8];
    const i64 kibibytes = (length - 1) / 1024;
    const int rest = (length - 1 - kibibytes * 1024) / 64;  // stripes of the last kibibyte, which is not scrambled
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = lane % 8, first = lane / 8;
    u64 sum = START[i], secret[4];
    const u64 scramble = SECRET[16 + i];
#pragma unroll
    for (int k = 0; k < 4; k++) secret[k] = SECRET[first + 4 * k + i];
    for (i64 begin = 0, round = 0; begin <= kibibytes; begin += ROUND, round++) {
        u64(*sums)[8] = added[round % 2];
        if (warp > 0) {
            u64 words[EACH][4];
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const i64 kibibyte = begin + EACH * (warp - 1) + e;
                const int stripes = kibibyte < kibibytes ? STRIPES : kibibyte == kibibytes ? rest : 0;
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    int stripe = first + 4 * k;
                    words[e][k] = stripe < stripes ? source.word(kibibyte * 128 + 8 * stripe + i) : secret[k];
                }
            }
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const i64 kibibyte = begin + EACH * (warp - 1) + e;
                const int stripes = kibibyte < kibibytes ? STRIPES : kibibyte == kibibytes ? rest : 0;
                u64 products = 0, plain = 0;
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    u64 keyed = words[e][k] ^ secret[k];
                    products += (keyed & 0xffffffffu) * (keyed >> 32);
                    if (first + 4 * k < stripes) plain += words[e][k];
                }
                products += shuffle_xor(plain, 1);
                products += shuffle_xor(products, 8);
                products += shuffle_xor(products, 16);
                if (lane < 8) sums[EACH * (warp - 1) + e][lane] = products;
            }
        }
        __syncthreads();
        if (warp == 0) {
            const int here = min((i64)ROUND, kibibytes + 1 - begin);
#pragma unroll 4
            for (int k = 0; k < here; k++) {
                sum += sums[k][i];
                if (begin + k < kibibytes) sum = (sum ^ sum >> 47 ^ scramble) * 0x9E3779B1ull;
            }
        }
    }
    __syncthreads();  // `added` is used again for the next block
    u64 last = source.word(length / 8 - 8 + i), keyed = last ^ LAST[i];
    sum += (keyed & 0xffffffffu) * (keyed >> 32) + shuffle_xor(last, 1);
    u64 merged = sum ^ MERGE[i];
    merged = folded_product(merged, shuffle_xor(merged, 1));
    if (i % 2) merged = 0;
    merged += shuffle_xor(merged, 2);
    merged += shuffle_xor(merged, 4);
    merged += (u64)length * 0x9E3779B185EBCA87ull;
    merged = __shfl_sync(FULL, merged, 0);
    merged = (merged ^ merged >> 37) * 0x165667919E3779F9ull;
    return merged ^ merged >> 32;
}

__device__ u64 checksum(const u8* block, i64 nbytes) { return long_checksum(Whole{block}, nbytes - 8); }

// Write headers, zeros behind `ends`, and checksums.
extern "C" __global__ void __launch_bounds__(THREADS) seal(const Job job) {
    const int thread = threadIdx.x;
    for (int block = blockIdx.x; block < job.n; block += gridDim.x) {
        u8* out = job.buffer + job.offsets[block];
        const u64* header = (const u64*)(job.headers + block * job.head_nbytes);
        for (int i = thread; i < job.head_nbytes / 8; i += THREADS) ((u64*)out)[i] = header[i];
        for (int i = 0; i < 4; i++)
            if (thread < (-job.ends[i] & 15)) out[job.ends[i] + thread] = 0;
        __syncthreads();
        u64 sum = checksum(out, job.nbytes[block]);
        if (thread == 0) *(u64*)(out + CHECKSUM_AT) = sum;
    }
}

// status: GOOD, BAD_CHECKSUM, or BAD_HEADER minus the offset of the first byte that is not the expected header's.
extern "C" __global__ void __launch_bounds__(THREADS) verify(const Job job) {
    const int thread = threadIdx.x;
    for (int block = blockIdx.x; block < job.n; block += gridDim.x) {
        const u8 *found = job.buffer + job.offsets[block], *wanted = job.headers + block * job.head_nbytes;
        bool right = checksum(found, job.nbytes[block]) == *(const u64*)(found + CHECKSUM_AT);
        const u32 end = job.head_nbytes;
        u32 differs = end;
        for (u32 i = thread; i < end && thread < 32; i += 32)
            if (found[i] != wanted[i] && (i < CHECKSUM_AT || i >= CHECKSUM_AT + 8)) differs = min(differs, i);
        differs = __reduce_min_sync(FULL, differs);
        if (thread == 0) job.status[block] = !right ? BAD_CHECKSUM : differs < end ? BAD_HEADER - (int)differs : GOOD;
    }
}
