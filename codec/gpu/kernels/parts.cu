// Calibrated sections (manthan.codec.cpu.klt) in encoded blocks: layout of the base and refinements, and copies of
// words from the buffers in which rows were encoded. A part is the base (level 0) or a lossy refinement (levels 1 to
// LEVELS - 1). Groups: see manthan.codec.profile. A row is a group's numbers in a part.

typedef u16 Half;  // fp16
__device__ __forceinline__ float wide(Half x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
__device__ __forceinline__ Half narrow(float x) { Half y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }

struct Group {
    int at, size;     // index of the group's first component among all groups', and number of its components
    int streams;      // number of rANS streams of a row
    int ahead;        // number of rANS streams of rows of the groups before it
};

struct LeveledSections : Lossy {  // arguments of a kernel, for n KV blocks; `rows` to `sizes` are scratch
    i64* ends;             // [n, LEVELS] end of each part in its encoded block; 0 if the part is not there
    const Group* groups;
    const u32* vectors;    // [components / HEAD_DIM] layer << 16 | kind << 15 | head of each vector
    const float *mean, *gain;   // [components]: see embedded.cu
    const float* weigher;       // [components + components / HEAD_DIM + groups]
    const float* offset;        // [components] added to rows before `weigher` is applied
    const u16* table_of;        // [components] see `shifted`
    const u8* tables;           // of the base, to encode or decode: see embedded.cu; then u32 `likely`, [refinements,
                                // TABLES, MAGNITUDES]: frequency of -1 | frequency of -1 and 0 together << 16; then, to
                                // encode, u32 reciprocals [4096]; to decode, int centres [LEVELS, TABLES, MAGNITUDES]
    Half* rows;                 // [some, width, C]: numbers to transform
    const float* products;      // [some, width, C]: numbers that the inverse transform gave
    Half* numbers;              // [components, width]
    signed char* shifts;        // [groups, width] j of each token
    int* steps;                 // [n] k of each block, whose steps are 2**(k / 3) times as large
    int* levels;                // [n] finest usable level of each block; not scratch
    u16* words;                 // [n, LEVELS, room of all groups]
    u32* states;                // [n, LEVELS, streams of all groups]
    u32* sizes;                 // [n, LEVELS, groups] words of a row
    i64 tables_nbytes, likely_at, rest_at, limit;   // limit: most bytes of the section
    int all, groups_count, components, streams;     // all: number of levels to write; streams: of all groups' rows
    int first_group, some, width;                   // `some` groups from first_group on; width: n * tokens, rounded up
};

#define FRONT_NBYTES 16
#define LEAST_BODY 160  // with 88 more bytes under the checksum, above the 240 bytes that xxh3's short form takes
#define LEAST_J -8

__device__ __forceinline__ int last_entry(const LeveledSections& job) { return (int)(job.head_nbytes - 128) / 64 - 1; }
__device__ __forceinline__ i64 shifts_nbytes(const LeveledSections& job) {
    return START_NBYTES + ((i64)job.groups_count * job.tokens + 3) / 4 * 2;
}
__device__ __forceinline__ i64 rows_front(const LeveledSections& job) { return 4ll * (job.groups_count + job.streams); }
// Bytes of a base's section, or of a refinement's body, whose rows have `words` words in all.
__device__ __forceinline__ i64 part_nbytes(const LeveledSections& job, int level, u64 words) {
    const i64 rows = rows_front(job) + 2 * words;
    return level ? max(align16(rows), (i64)LEAST_BODY) : shifts_nbytes(job) + rows;
}
__device__ __forceinline__ i64 row_room(const LeveledSections& job) { return (i64)job.components * job.tokens / NUMBERS_A_WORD; }
__device__ __forceinline__ u64 words_of(const LeveledSections& job, int block, int level) {
    u64 words = 0;
    for (int g = 0; g < job.groups_count; g++) words += job.sizes[((i64)block * LEVELS + level) * job.groups_count + g];
    return words;
}
// Offset of a part's rows in an encoded block.
__device__ __forceinline__ i64 rows_at(const LeveledSections& job, int block, int level) {
    return level ? job.ends[(i64)block * LEVELS + level - 1] + FRONT_NBYTES : job.start + shifts_nbytes(job);
}

// Lay out the parts of good blocks: write sizes, ends, headers, and zeros behind the parts. Others get size and ends 0.
extern "C" __global__ void lay_out(const LeveledSections job) {
    const int lane = threadIdx.x % 32;
    for (int block = SPREAD_WARP; block < job.n; block += gridDim.x * WARPS) {
        if (job.status[block] != GOOD) {
            if (lane < LEVELS) job.ends[(i64)block * LEVELS + lane] = 0;
            if (lane == 0) job.nbytes[block] = 0;
            continue;
        }
        u8* out = job.buffer + job.offsets[block];
        const u64* header = (const u64*)(job.headers + block * job.head_nbytes);
        for (int i = lane; i < job.head_nbytes / 8; i += 32) ((u64*)out)[i] = header[i];
        __syncwarp();
        i64* ends = job.ends + (i64)block * LEVELS;
        i64 end = job.start;
        for (int level = 0; level < LEVELS; level++) {
            if (level >= job.all) {
                if (lane == 0) ends[level] = 0;
                continue;
            }
            const u64 words = words_of(job, block, level);
            const i64 nbytes = part_nbytes(job, level, words);
            if (level) {
                if (lane == 0) *(u64*)(out + end) = (u64)level | (u64)nbytes << 32;
                end += FRONT_NBYTES;
            }
            const i64 filled = level ? rows_front(job) + 2 * words : nbytes;
            const i64 next = align16(end + nbytes);
            for (i64 i = end + filled + lane; i < next; i += 32) out[i] = 0;
            if (level == 0 && lane < START_NBYTES)
                out[end + lane] = lane == 0 ? SECTION_VERSION : lane == 1 ? job.steps[block] : 0;
            if (level == 0 && lane == 0) *(u64*)(out + ENTRY_AT(last_entry(job))) = nbytes;
            end = next;
            if (lane == 0) {
                if (level == 0) *(u64*)(out + NBYTES_AT) = end;
                ends[level] = end;
            }
        }
        if (lane == 0) job.nbytes[block] = end;
    }
}

// Copy shifts, and sizes, states and words of all rows, into good blocks. A warp takes a row.
extern "C" __global__ void pack(const LeveledSections job) {
    const int lane = threadIdx.x % 32, groups = job.groups_count;
    for (u32 run = blockIdx.x * WARPS + threadIdx.x / 32; run < (u32)(job.n * job.all * groups); run += gridDim.x * WARPS) {
        const int block = run / groups / job.all, level = run / groups % job.all, g = run % groups;
        if (job.status[block] != GOOD) continue;
        u8* out = job.buffer + job.offsets[block];
        if (level == 0 && g == 0) {
            u8* kept = out + job.start + START_NBYTES;
            const int count = groups * job.tokens;
            for (int i = lane; i < (count + 3) / 4 * 2; i += 32) {
                u32 both = 0;
                for (int k = 0; k < 2; k++) {
                    const int at = 2 * i + k;
                    if (at < count)
                        both |= (u32)(job.shifts[(i64)(at / job.tokens) * job.width + block * job.tokens + at % job.tokens] -
                                      LEAST_J) << 4 * k;
                }
                kept[i] = both;
            }
        }
        u8* rows = out + rows_at(job, block, level);
        const i64 place = (i64)block * LEVELS + level;
        const u32* sizes = job.sizes + place * groups;
        const Group group = job.groups[g];
        if (lane < 2) ((u16*)rows)[2 * g + lane] = sizes[g] >> 16 * lane;
        const u16* states = (const u16*)(job.states + place * job.streams + group.ahead);
        u16* to = (u16*)(rows + 4ll * (groups + group.ahead));
        for (int i = lane; i < 2 * group.streams; i += 32) to[i] = states[i];
        u32 before = 0;
        for (int i = lane; i < g; i += 32) before += sizes[i];
#pragma unroll
        for (int k = 16; k; k /= 2) before += __shfl_xor_sync(FULL, before, k);
        const u16* end = job.words + place * row_room(job) + (i64)(group.at + group.size) * job.tokens / NUMBERS_A_WORD;
        copy_words((u16*)(rows + rows_front(job)) + before, end - sizes[g], sizes[g], lane);
    }
}

// Words under a refinement's checksum: block hash, fingerprint, the refinement's number and length, and its body.
struct Refined {
    const u8 *block, *front;
    __device__ __forceinline__ u64 word(i64 i) const {
        if (i < 8) return *(const u64*)(block + 64 + 8 * i);
        if (i < 10) return *(const u64*)(block + 16 + 8 * (i - 8));
        return *(const u64*)(front + (i == 10 ? 0 : FRONT_NBYTES + 8 * (i - 11)));
    }
};

// Return the checksum of a part of an encoded block. at: becomes the address at which the block has it.
__device__ __forceinline__ u64 checksum_of(const LeveledSections& job, int block, int level, u64*& at) {
    u8* there = job.buffer + job.offsets[block];
    const i64* ends = job.ends + (i64)block * LEVELS;
    if (level == 0) {
        at = (u64*)(there + CHECKSUM_AT);
        return checksum(there, ends[0]);
    }
    const u8* front = there + ends[level - 1];
    at = (u64*)(front + 8);
    return long_checksum(Refined{there, front}, 88 + (i64)(*(const u64*)front >> 32));
}

extern "C" __global__ void __launch_bounds__(THREADS) seal_parts(const LeveledSections job) {
    for (int run = blockIdx.x; run < job.n * job.all; run += gridDim.x) {
        const int block = run / job.all, level = run % job.all;
        if (job.status[block] != GOOD) continue;
        u64* at;
        const u64 sum = checksum_of(job, block, level, at);
        if (threadIdx.x == 0) *at = sum;
    }
}

// Set `ends`, and `levels` to the number of lossy refinements. status: GOOD; BAD_HEADER minus an offset if the header
// or a length is wrong; or BAD_CHECKSUM if the refinements do not end where the block does.
extern "C" __global__ void find_parts(const LeveledSections job) {
    const int lane = threadIdx.x % 32;
    for (int block = SPREAD_WARP; block < job.n; block += gridDim.x * WARPS) {
        const u8 *found = job.buffer + job.offsets[block], *wanted = job.headers + block * job.head_nbytes;
        u32 end = job.head_nbytes, differs = end;
        for (u32 i = lane; i < end; i += 32) {
            const bool length = i / 8 == NBYTES_AT / 8 || i / 8 == ENTRY_AT(last_entry(job)) / 8;
            if (found[i] != wanted[i] && !length && i / 8 != CHECKSUM_AT / 8) differs = min(differs, i);
        }
        const i64 base = *(const u64*)(found + NBYTES_AT), all = job.nbytes[block];
        const i64 nbytes = *(const u64*)(found + ENTRY_AT(last_entry(job)));
        const bool fits = base <= all && base >= job.head_nbytes + 16 && nbytes >= 0 && nbytes <= job.limit &&
                          job.start + align16(nbytes) == base;
        if (!fits) differs = min(differs, (u32)NBYTES_AT);
        differs = __reduce_min_sync(FULL, differs);
        if (lane == 0) {
            job.status[block] = differs < end ? BAD_HEADER - (int)differs : GOOD;
            i64* ends = job.ends + (i64)block * LEVELS;
            int level = 0;
            ends[0] = base;
            i64 last = base;
            for (int number = 1; fits && number <= LEVELS && last + FRONT_NBYTES <= all; number++) {
                const u64 front = *(const u64*)(found + last);
                const i64 size = front >> 32, next = last + FRONT_NBYTES + size;
                if ((front & 0xffffffffu) != (u64)number || size % 16 || size < LEAST_BODY || next > all) break;
                last = next;
                if (number < LEVELS) ends[++level] = next;
            }
            job.levels[block] = level;
            if (fits && last != all && differs == end) job.status[block] = BAD_CHECKSUM;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) verify_parts(const LeveledSections job) {
    for (int run = blockIdx.x; run < job.n * LEVELS; run += gridDim.x) {
        const int block = run / LEVELS, level = run % LEVELS;
        const i64* ends = job.ends + (i64)block * LEVELS;
        if (level > job.levels[block] || ends[0] < job.head_nbytes || ends[level] > job.nbytes[block]) continue;
        u64* at;
        const u64 sum = checksum_of(job, block, level, at);
        if (threadIdx.x || sum == *at) continue;
        if (level == 0) job.status[block] = BAD_CHECKSUM;
        else atomicMin(job.status + block, BAD_CHECKSUM);
    }
}

// Read sizes of rows and shifts of good blocks. The status becomes 0 if the base begins wrong, or the base's sizes do
// not add up. A refinement whose sizes do not add up is left out, with all behind it.
extern "C" __global__ void find_rows(const LeveledSections job) {
    const int lane = threadIdx.x % 32, groups = job.groups_count;
    for (int block = SPREAD_WARP; block < job.n; block += gridDim.x * WARPS) {
        if (job.status[block] != GOOD) continue;
        const u8* found = job.buffer + job.offsets[block];
        const int there = job.levels[block];
        const i64 nbytes = *(const u64*)(found + ENTRY_AT(last_entry(job)));
        const u32 begins = *(const u32*)(found + job.start);
        int good = (begins & 255) == SECTION_VERSION && begins >> 8 <= MOST_K ? there : -1;
        const int count = groups * job.tokens;
        for (int level = 0; level <= good; level++) {
            const i64 at = rows_at(job, block, level);
            const i64 end = level ? job.ends[(i64)block * LEVELS + level] : job.start + nbytes;
            u32* sizes = job.sizes + ((i64)block * LEVELS + level) * groups;
            if (at + rows_front(job) > end) { good = level - 1; break; }
            for (int g = lane; g < groups; g += 32) {
                const u16* size = (const u16*)(found + at + 4ll * g);
                sizes[g] = size[0] | (u32)size[1] << 16;
            }
            __syncwarp();
            u64 words = 0;
            for (int g = 0; g < groups; g++) words += sizes[g];
            if (words > (u64)job.limit || at + part_nbytes(job, level, words) - (level ? 0 : shifts_nbytes(job)) != end)
                good = level - 1;
        }
        if (good >= 0) {
            const u8* kept = found + job.start + START_NBYTES;
            for (int i = lane; i < count; i += 32) {
                const int j = (kept[i / 2] >> 4 * (i % 2) & 15) + LEAST_J;
                job.shifts[(i64)(i / job.tokens) * job.width + block * job.tokens + i % job.tokens] = j;
            }
        }
        if (lane == 0) {
            job.steps[block] = begins >> 8;
            job.levels[block] = good;
            if (good < 0) job.status[block] = 0;
        }
    }
}
