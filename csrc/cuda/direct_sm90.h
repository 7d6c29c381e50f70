// Cutting a problem for direct and fused by wgmma (direct_sm90.cuh), for host and device: rectangles of positions,
// tiles of the gradient, and which block adds up which samples of which tile. Integers in, integers out.
//
// One sample's gradient is sum_t b_nt a_nt^T. A step of it is a rectangle of `width` x `height` output pixels (of a
// Linear: `width` positions): one box of grad_output for each 64 of its features, and one box of the input for each 64
// channels of each tap, moved by that tap. Columns of the gradient are thus blocks of 64 channels, tap by tap.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HOST_DEVICE inline
#endif

namespace torchgradx::cuda::sm90 {

constexpr int kBox = 64;       // features of a box: 128 bytes
constexpr int kDepth = 16;     // positions that one wgmma adds up
constexpr int kMostSteps = 8;  // of kDepth in a rectangle
constexpr int kMostStages = 8;
constexpr int kRows = 64;                    // of the gradient, of one warpgroup
constexpr int kSharedBytes = 232448 - 1024;  // what a block may have, less its barriers and totals

// Division of the work: each of G teams first takes `whole` tiles with all their samples, then its share of the (tile,
// sample) items of the tiles that are left, in this order. A share touches two tiles at most, since it is shorter than
// a tile. A team is a block, or a cluster of two, each of which has half of a tile, one above the other.
struct Schedule {
  int N, tiles_down, tiles_across, teams;
  int band;         // rows of tiles that neighbouring teams take together, whose operands then stay in L2
  int whole, left;  // tiles
  int each, more;   // items of a team; the first `more` teams have one item more

  HOST_DEVICE int tiles() const {
    return tiles_down * tiles_across;
  }
  HOST_DEVICE int first_item(int team) const {
    return team * each + (team < more ? team : more);
  }
  HOST_DEVICE void place(int tile, int& down, int& across) const {
    const int wide = band * tiles_across, which = tile / wide, within = tile - which * wide;
    const int high = tiles_down - which * band < band ? tiles_down - which * band : band;
    across = within / high;
    down = which * band + within - across * high;
  }
  HOST_DEVICE int tile_at(int down, int across) const {
    const int which = down / band, high = tiles_down - which * band < band ? tiles_down - which * band : band;
    return which * band * tiles_across + across * high + down - which * band;
  }
  HOST_DEVICE int most_sharers() const {  // of a tile
    const int most = each ? (N + each - 1) / each + 1 : N;
    return most < teams ? most : teams;
  }
};

struct Segment {  // samples [first, last) of a block's tile, in which clusters count half tiles
  int tile, down, across, first, last;
  int slot;  // where the sum is left for finish(); -1: these are all samples
};

// A block's segment of this number; false behind the last. Of two shares, the one that begins at sample 0 comes first:
// blocks then stay near the same sample.
template <int cluster>
HOST_DEVICE bool segment_of(const Schedule& s, int block, int number, Segment& segment) {
  const int team = block / cluster, rank = block % cluster;
  if (number < s.whole) {
    segment.tile = number * s.teams + team;
    segment.first = 0, segment.last = s.N, segment.slot = -1;
  } else {
    const int begin = s.first_item(team), end = s.first_item(team + 1), next_tile = (begin / s.N + 1) * s.N;
    const int cut = next_tile < end ? next_tile : end, shares = (end > begin) + (end > cut);
    const int share = number - s.whole;
    if (share >= shares) return false;
    const int which = shares == 2 ? 1 - share : share;
    const int from = which ? cut : begin, to = which ? end : cut, tile = from / s.N;
    segment.first = from - tile * s.N, segment.last = segment.first + to - from;
    segment.slot = to - from == s.N ? -1 : (2 * team + which) * cluster + rank;
    segment.tile = s.whole * s.teams + tile;
  }
  s.place(segment.tile, segment.down, segment.across);
  segment.tile = segment.tile * cluster + rank, segment.down = segment.down * cluster + rank;
  return true;
}

struct Boxes {
  int width, height;      // of a rectangle
  int across, down;       // rectangles of a sample
  int steps, last_steps;  // of kDepth positions; those from rectangle `shorter` on have fewer
  int shorter;
  int stages, stage_bytes;                    // of shared memory: boxes of grad_output, then of the input
  int grad_bytes, input_bytes, input_offset;  // of a box, and where the input's begin
  int copied_bytes;                           // by all boxes of a stage
  int input_step;                             // bytes from 16 positions of the input to the next 16
  int between, group;                         // Descriptor's, of the input
  bool halo;                                  // the taps of a row of the kernel read one box, 128 bytes apart
  bool clears;                 // shared memory that no box covers is multiplied by zeros: it must hold numbers
  int channel_blocks, blocks;  // of 64 channels, of one tap and of all
  int kernel_width, taps;
  int stride_x, stride_y, dilation_x, dilation_y, pad_x, pad_y;
};

// Place of a tile's block of 64 columns in the gradient: tap -1 if outside.
struct Column {
  int tap, channel;
};

// `wide`: column blocks of a warpgroup; unit: the warpgroup's number among all those that stand side by side.
HOST_DEVICE Column column_of(const Boxes& boxes, int wide, int unit, int block) {
  if (boxes.halo) {
    const int row = unit / boxes.channel_blocks, first = row * boxes.kernel_width;
    return {first < boxes.taps ? first + block : -1, (unit - row * boxes.channel_blocks) * kBox};
  }
  const int which = unit * wide + block, tap = which / boxes.channel_blocks;
  return {which < boxes.blocks ? tap : -1, (which - tap * boxes.channel_blocks) * kBox};
}

}  // namespace torchgradx::cuda::sm90
