// Layout of entropy-coded sections (manthan.codec.cpu.rans) in encoded blocks: find a section's rows, write headers,
// and copy the rows' 16-bit words from scratch into the blocks. A row is a layer's keys or a layer's values; rows of
// keys come first. KINDS is 2 for keys and values, and 1 for latents (MLA), whose pieces stand as heads of keys.

struct Sections : Lossy {  // lossy keys and values of n KV blocks with the same number of exact tokens
    u16* words;             // [rows, n, room] scratch; a row's words end at the end of its room
    u32* states;            // [n, rows, streams] scratch: states of the rANS streams
    u32* sizes;             // [n, rows] number of words of a row
    u32* firsts;            // [n, rows] number of words of earlier rows in the section
    int* far;               // [n, 2] 1 if a row of keys, or of values, does not fit into its room
    u8* fronts;             // [n, 2, fronts_nbytes]: a section's bytes between START_NBYTES and its rows
    int* doublings;         // [n, 2] how often the steps of keys, and of values, are doubled
    u32* starts;            // [n, 2] offset of the keys' and the values' section in the encoded block
    i64 limits[2];          // most bytes of the keys' and of the values' section
    i64 parts[2], fronts_nbytes;  // parts: bytes of the two fronts; fronts_nbytes: of the larger, padded to 16
    int streams, rows;      // streams: rANS streams of a row; rows: KINDS * layers
    u32 room;               // most words of a row in scratch
};

__device__ __forceinline__ int components(const Sections& job) { return job.heads * HEAD_DIM; }
__device__ __forceinline__ int first_entry(const Sections& job) { return (int)(job.head_nbytes - 128) / 64 - KINDS; }
__device__ __forceinline__ bool wide_sizes(const Sections& job) {  // True if a row's number of words is u32, not u16
    return 7ull * job.tokens * components(job) >= 4ull << 16;
}
__device__ __forceinline__ i64 sizes_nbytes(const Sections& job) { return (wide_sizes(job) ? 4 : 2) * (i64)job.layers; }
__device__ __forceinline__ i64 rows_at(const Sections& job, int kind) { return START_NBYTES + job.parts[kind]; }
__device__ __forceinline__ i64 front_nbytes(const Sections& job, int kind) {  // bytes of a section ahead of its rows' words
    return rows_at(job, kind) + sizes_nbytes(job) + 4ll * job.layers * job.streams;
}

// Set `firsts` of a section's rows from `sizes`; return the sum of the sizes. A row of more words than the section may
// have counts as one word more than that, so that no sum overflows.
__device__ __forceinline__ u64 place_rows(const Sections& job, int block, int kind, const u32* sizes, int lane) {
    u64 total = 0;
    for (int first = 0; first < job.layers; first += 32) {
        int layer = first + lane;
        u32 size = layer < job.layers ? min(sizes[layer], (u32)(job.limits[kind] / 2) + 1) : 0, before = size;
#pragma unroll
        for (int i = 1; i < 32; i *= 2) {
            u32 other = __shfl_up_sync(FULL, before, i);
            if (lane >= i) before += other;
        }
        if (layer < job.layers) job.firsts[(i64)(block * KINDS + kind) * job.layers + layer] = total + before - size;
        total += __shfl_sync(FULL, before, 31);
    }
    return total;
}

// True if all rows fit into their room, and the section, as encoded now, within its limit.
__device__ __forceinline__ bool fits(const Sections& job, int block, int kind, int lane) {
    const u64 words = place_rows(job, block, kind, job.sizes + (i64)(block * KINDS + kind) * job.layers, lane);
    return !*(volatile int*)(job.far + 2 * block + kind) && front_nbytes(job, kind) + 2 * words <= job.limits[kind];
}

// `number`, in steps that are 2**doublings times as large, to the nearest whole number, ties to even.
__device__ __forceinline__ int halved(int number, int doublings) {
    return __float2int_rn((float)number * f((127u - doublings) << 23));
}

// Write each encoded block's header with lengths, and sections' first bytes and padding. Set nbytes, starts and `firsts`.
extern "C" __global__ void lay_out(const Sections job) {
    int lane = threadIdx.x % 32;
    for (int block = SPREAD_WARP; block < job.n; block += gridDim.x * WARPS) {
        u8* out = job.buffer + job.offsets[block];
        const u64* header = (const u64*)(job.headers + block * job.head_nbytes);
        for (int i = lane; i < job.head_nbytes / 8; i += 32) ((u64*)out)[i] = header[i];
        __syncwarp();
        i64 at = job.start;
        for (int kind = 0; kind < KINDS; kind++) {
            u64 words = place_rows(job, block, kind, job.sizes + (i64)(block * KINDS + kind) * job.layers, lane);
            i64 nbytes = front_nbytes(job, kind) + 2 * words;
            i64 end = align16(at + nbytes);
            if (lane < end - at - nbytes) out[at + nbytes + lane] = 0;
            if (lane < START_NBYTES)
                out[at + lane] = lane == 0 ? SECTION_VERSION : lane == 1 ? job.doublings[2 * block + kind] : 0;
            if (lane == 0) {
                *(u64*)(out + ENTRY_AT(first_entry(job) + kind)) = nbytes;
                job.starts[2 * block + kind] = at;
            }
            at = end;
        }
        if (lane == 0) {
            *(u64*)(out + NBYTES_AT) = at;
            job.nbytes[block] = at;
        }
    }
}

// Write the fronts, and the sizes, states and words of all rows. States are copied as u16: they may begin at an odd
// multiple of 2 bytes.
extern "C" __global__ void pack(const Sections job) {
    int lane = threadIdx.x % 32;
    u32 all = KINDS * job.layers;
    for (u32 run = blockIdx.x * WARPS + threadIdx.x / 32; run < job.n * all; run += gridDim.x * WARPS) {
        u32 block = run / all, row = run % all, kind = row >= job.layers, layer = row - kind * job.layers;
        u8* section = job.buffer + job.offsets[block] + job.starts[2 * block + kind];
        const u32 *front = (const u32*)(job.fronts + (2 * block + kind) * job.fronts_nbytes), share = job.parts[kind] / 4;
        for (u32 i = (u64)share * layer / job.layers + lane; i < (u64)share * (layer + 1) / job.layers; i += 32)
            ((u32*)(section + START_NBYTES))[i] = front[i];
        u32 size = job.sizes[run];
        if (lane == 0) {
            if (wide_sizes(job)) *(u32*)(section + rows_at(job, kind) + 4 * layer) = size;
            else *(u16*)(section + rows_at(job, kind) + 2 * layer) = size;
        }
        const u16* states = (const u16*)(job.states + (i64)run * job.streams);
        u16* kept = (u16*)(section + rows_at(job, kind) + sizes_nbytes(job) + 4ll * layer * job.streams);
        for (int i = lane; i < 2 * job.streams; i += 32) kept[i] = states[i];
        const u16* from = job.words + ((i64)row * job.n + block + 1) * job.room - size;
        u16* to = (u16*)(section + front_nbytes(job, kind)) + job.firsts[run];
        copy_words(to, from, size, lane);
    }
}

// status: GOOD, BAD_CHECKSUM, or BAD_HEADER minus the offset of the first unexpected byte of the header. The lengths of
// block and sections vary: they need only agree with each other, with `nbytes` and with `limits`.
extern "C" __global__ void __launch_bounds__(THREADS) verify_sections(const Sections job) {
    const int thread = threadIdx.x;
    for (int block = blockIdx.x; block < job.n; block += gridDim.x) {
        const u8 *found = job.buffer + job.offsets[block], *wanted = job.headers + block * job.head_nbytes;
        bool right = checksum(found, job.nbytes[block]) == *(const u64*)(found + CHECKSUM_AT);
        u32 end = job.head_nbytes, differs = end;
        for (u32 i = thread; i < end && thread < 32; i += 32) {
            bool length = i / 8 == NBYTES_AT / 8;
            for (int kind = 0; kind < KINDS; kind++) length |= i / 8 == ENTRY_AT(first_entry(job) + kind) / 8;
            if (found[i] != wanted[i] && !length && i / 8 != CHECKSUM_AT / 8) differs = min(differs, i);
        }
        i64 at = job.start;
        bool fits = *(const u64*)(found + NBYTES_AT) == job.nbytes[block];
        for (int kind = 0; kind < KINDS; kind++) {
            u64 nbytes = *(const u64*)(found + ENTRY_AT(first_entry(job) + kind));
            fits = fits && nbytes >= START_NBYTES && nbytes <= job.limits[kind];
            if (fits) at += align16(nbytes);
        }
        if (!fits || at != job.nbytes[block]) differs = min(differs, (u32)NBYTES_AT);
        differs = __reduce_min_sync(FULL, differs);
        if (thread == 0) job.status[block] = !right ? BAD_CHECKSUM : differs < end ? BAD_HEADER - (int)differs : GOOD;
    }
}

// Set `sizes`, `firsts`, `doublings` and `starts` of good blocks. A status becomes 0 if a section's parts do not add up
// to the section's length, or if its first bytes are wrong.
extern "C" __global__ void find_rows(const Sections job) {
    int lane = threadIdx.x % 32;
    for (int block = SPREAD_WARP; block < job.n; block += gridDim.x * WARPS) {
        if (job.status[block] != GOOD) continue;
        const u8* found = job.buffer + job.offsets[block];
        i64 at = job.start;
        bool fits = true;
        for (int kind = 0; kind < KINDS; kind++) {
            i64 nbytes = *(const u64*)(found + ENTRY_AT(first_entry(job) + kind));
            const u8* section = found + at;
            u32 begins = *(const u32*)section, doublings = begins >> 8;
            fits = fits && (begins & 255) == SECTION_VERSION && doublings <= MOST_DOUBLINGS;
            fits = fits && nbytes >= front_nbytes(job, kind);
            if (fits) {
                u32* sizes = job.sizes + (i64)(block * KINDS + kind) * job.layers;
                for (int i = lane; i < job.layers; i += 32) {
                    const u16* size = (const u16*)(section + rows_at(job, kind) + (wide_sizes(job) ? 4 : 2) * i);
                    sizes[i] = size[0] | (wide_sizes(job) ? (u32)size[1] << 16 : 0);
                }
                __syncwarp();
                fits = front_nbytes(job, kind) + 2 * place_rows(job, block, kind, sizes, lane) == nbytes;
            }
            if (lane == 0) {
                job.doublings[2 * block + kind] = doublings;
                job.starts[2 * block + kind] = at;
            }
            at += align16(nbytes);
        }
        if (lane == 0 && !fits) job.status[block] = 0;
    }
}
