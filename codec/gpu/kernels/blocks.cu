// The coded sections of many blocks in one launch: every warp of it takes an equal run of tiles. Keys are kind 0, values
// kind 1.

__device__ __forceinline__ u32 tiles_of_layer(const Job& job) { return job.heads * ((job.tokens + TILE - 1) / TILE); }

struct Place {  // a tile of the keys, or of the values, of one layer of one block, and how many tiles follow in it
    Word* x;
    u8 *scales, *planes;
    int block, index, token, tiles;

    __device__ __forceinline__ Place(const Job& job, u32 tile, int kind) {
        u32 of_layer = tiles_of_layer(job), of_head = (job.tokens + TILE - 1) / TILE, in_layer = tile % of_layer;
        tile /= of_layer;
        int layer = tile % (u32)job.layers;
        block = tile / (u32)job.layers;
        tiles = of_layer - in_layer;
        int head = in_layer / of_head;
        token = in_layer % of_head * TILE;
        x = (Word*)job.caches[layer] + job.block_ids[block] * job.block_stride + job.at[kind];
        x += head * job.head_stride + token * job.token_stride;
        u8* codes = job.codes + job.offsets[block] + job.payload[kind];
        i64 vectors = (i64)job.heads * job.tokens;
        index = layer * vectors + head * job.tokens + token;
        scales = codes + 2 * index;
        int bits = kind ? VALUE_BITS : KEY_BITS;
        planes = codes + (2 * vectors * job.layers + 15) / 16 * 16 + index * (i64)(bits * (HEAD_DIM / 8));
    }
    __device__ __forceinline__ void next(const Job& job, int width) {
        scales += 2 * valid(job);
        planes += width * valid(job);
        index += valid(job);
        token += TILE;
        x += TILE * job.token_stride;
        if (token >= job.tokens) {
            x += job.head_stride - token * job.token_stride;
            token = 0;
        }
    }
    __device__ __forceinline__ Word* vector(const Job& job, int t) const { return x + t * job.token_stride; }
    __device__ __forceinline__ int valid(const Job& job) const { return WHOLE ? TILE : min(TILE, job.tokens - token); }
};

struct Room {  // of a warp, in shared memory
#if FAST
    uint4 tile[(KEY_BITS > VALUE_BITS ? KEY_BITS : VALUE_BITS) * HEAD_DIM / 16];
#endif
    float sums[64];
};

template <int BITS>
__device__ __forceinline__ void encode_run(const Job& job, Place place, const Encoder& encoder, int lane, Room& room) {
    const int width = BITS * (HEAD_DIM / 8);
#if FAST
    Piece piece;
    piece.fetch(place.vector(job, min(lane >> 2, place.valid(job) - 1)), lane);
#endif
    for (int tile = 0; tile < place.tiles; tile++) {
        const Place now = place;
        int valid = now.valid(job);
        place.next(job, width);
        u32 slow = (1u << valid) - 1;
#if FAST
        float c[CHUNKS][4], norm[2];
        transform(encoder, piece, c, norm, lane);
        if (tile + 1 < place.tiles) piece.fetch(place.vector(job, min(lane >> 2, place.valid(job) - 1)), lane);
        slow = encode_tile<BITS>(c, norm, now.scales, now.planes, valid, room.tile, lane);
        if (slow) __syncwarp();
#endif
        for (; slow; slow &= slow - 1) {
            int t = __ffs(slow) - 1;
            bool finite = encode_vector<BITS>(now.vector(job, t), now.scales + 2 * t, now.planes + t * width, lane, room.sums);
            if (!finite && lane == 0) atomicMin(job.status + now.block, now.index + t);
        }
    }
}

template <int BITS>
__device__ __forceinline__ void decode_run(const Job& job, Place place, const Decoder& decoder, int lane) {
    const int width = BITS * (HEAD_DIM / 8);
#if FAST
    Packed<BITS> packed[AHEAD];  // of the tiles that follow
    Place far = place;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        if (i < place.tiles) packed[i].fetch(far.scales, far.planes, far.valid(job), lane);
        far.next(job, width);
    }
#endif
    for (int tile = 0; tile < place.tiles; tile++) {
        const Place now = place;
        int valid = now.valid(job);
        place.next(job, width);
        u32 slow = (1u << valid) - 1;
#if FAST
        Packed<BITS> these = packed[0];
#pragma unroll
        for (int i = 1; i < AHEAD; i++) packed[i - 1] = packed[i];
        if (tile + AHEAD < place.tiles) packed[AHEAD - 1].fetch(far.scales, far.planes, far.valid(job), lane);
        far.next(job, width);
        slow = decode_tile<BITS>(decoder, these, now.vector(job, 0), job.token_stride, valid, lane);
        if (slow) __syncwarp();
#endif
        for (; slow; slow &= slow - 1) {
            int t = __ffs(slow) - 1;
            bool finite = decode_vector<BITS>(now.scales + 2 * t, now.planes + t * width, now.vector(job, t), lane);
            if (!finite && lane == 0) atomicMin(job.status + now.block, now.index + t);
        }
    }
}

struct Range {  // the tiles of this warp: all warps of the launch share the keys evenly, and the values, which take
    u32 tile, end;  // longer or shorter where they have other bits

    __device__ __forceinline__ Range(const Job& job) {
        u32 all = (u32)job.n * job.layers * tiles_of_layer(job);
        u32 warp = blockIdx.x * CODE_WARPS + threadIdx.x / 32, warps = gridDim.x * CODE_WARPS;
        u32 each = all / warps, more = all % warps;  // the first so many warps take one more
        tile = warp * each + min(warp, more);
        end = tile + each + (warp < more);
    }
    __device__ __forceinline__ void take(Place& place) {
        place.tiles = min((u32)place.tiles, end - tile);
        tile += place.tiles;
    }
};

template <int BITS>
__device__ __forceinline__ void encode_kind(const Job& job, int kind, const Encoder& encoder, int lane, Room& room) {
    Range range(job);
    while (range.tile < range.end) {
        Place place(job, range.tile, kind);
        range.take(place);
        encode_run<BITS>(job, place, encoder, lane, room);
    }
}

template <int BITS>
__device__ __forceinline__ void decode_kind(const Job& job, int kind, const Decoder& decoder, int lane) {
    Range range(job);
    while (range.tile < range.end) {
        Place place(job, range.tile, kind);
        range.take(place);
        if (*(volatile int*)(job.status + place.block) >= 0) decode_run<BITS>(job, place, decoder, lane);
    }
}

// status: GOOD must be there before; becomes the first vector that is not finite.
extern "C" __global__ void __launch_bounds__(CODE_THREADS, ENCODE_BLOCKS) encode(const Job job) {
    __shared__ Room rooms[CODE_WARPS];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    pin(lane), pin(warp);
    const Encoder encoder(lane);
    if (KEY_BITS == VALUE_BITS) {
#pragma unroll 1
        for (int kind = 0; kind < 2; kind++) encode_kind<KEY_BITS>(job, kind, encoder, lane, rooms[warp]);
    } else {
        encode_kind<KEY_BITS>(job, 0, encoder, lane, rooms[warp]);
        encode_kind<VALUE_BITS>(job, 1, encoder, lane, rooms[warp]);
    }
}

// Blocks whose status is below 0, which `verify` has refused, are left alone; of the others it becomes the first vector
// whose scale is not finite.
extern "C" __global__ void __launch_bounds__(CODE_THREADS, DECODE_BLOCKS) decode(const Job job) {
    u32 lane = threadIdx.x % 32;
    pin(lane);
    const Decoder decoder(lane);
    if (KEY_BITS == VALUE_BITS) {
#pragma unroll 1
        for (int kind = 0; kind < 2; kind++) decode_kind<KEY_BITS>(job, kind, decoder, lane);
    } else {
        decode_kind<KEY_BITS>(job, 0, decoder, lane);
        decode_kind<VALUE_BITS>(job, 1, decoder, lane);
    }
}
