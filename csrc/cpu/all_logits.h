// The logits of all queries with all keys, which a loss turns into weights, and the products of these weights with the
// keys and the queries: the gradients.
//
// A group of queries meets one span of blocks of keys after another. Each block is one task, so a loss may sum over a
// block's queries without a lock. Without a gradient a worker has room for the logits of one block. With one, the
// weights of a span stay until both sides have had them: three products, the logits included, and no more than
// GROUP x SPAN x KEYS logits exist at a time.
#pragma once

#include "cpu/logits.h"
#include "cpu/tasks.h"

namespace fedkernels::FEDKERNELS_ISA {

template <class T>
struct AllLogits {
  static constexpr int64_t WIDE = TILE_COLUMNS<T>, KEYS = 256 / TILE_ROWS * TILE_ROWS, PANELS = 4, SPAN = 8;

  Rows<T> query, key;
  int64_t queries, keys, width, blocks, group, span, workers;  // group: queries in one; span: blocks in one
  T *to_query, *to_key;                                        // the gradients, or null
  T *packed_queries, *plain_queries, *packed_keys, *chunks, *own, *buffers;

  // A block of keys and a group of queries: chunks[panel * pitch + j * WIDE + lane] belongs to key `block` * KEYS + j
  // and to query first + panel * WIDE + lane.
  struct Block {
    T* chunks;
    int64_t pitch, block, keys, first, queries, panels;

    T* chunk(int64_t panel) const { return chunks + panel * pitch; }
  };

  AllLogits(Memory& memory, Array query_rows, Array key_rows, int64_t queries, int64_t keys, int64_t width,
            T* to_query, T* to_key, int64_t workers)
      : queries(queries), keys(keys), width(width), workers(workers), to_query(to_query), to_key(to_key) {
    query = {query_rows, query_rows, queries, width};
    key = {key_rows, key_rows, keys, width};
    blocks = up(keys, KEYS) / KEYS;
    group = least(up(queries, WIDE), 512);
    span = least(blocks, SPAN > 2 * workers ? SPAN : 2 * workers);
    const bool keeps = to_query || to_key;
    packed_queries = memory.take<T>(group * width);
    buffers = memory.take<T>(workers * KEYS * width);
    chunks = memory.take<T>(group * (keeps ? kept_keys() : workers * KEYS));
    plain_queries = memory.take<T>(to_key ? group * up(width, WIDE) : 0);
    packed_keys = memory.take<T>(to_query ? blocks * KEYS * up(width, TILE_ROWS) : 0);
    own = memory.take<T>(to_query ? group / WIDE * own_size() : 0);
  }

  int64_t kept_keys() const { return up(least(keys, span * KEYS), TILE_ROWS); }
  int64_t own_size() const { return up(width, TILE_ROWS) * WIDE; }  // the gradient of one panel
  int64_t keys_of(int64_t block) const { return least(KEYS, keys - block * KEYS); }
  T* buffer(int64_t worker) const { return buffers + worker * KEYS * width; }

  // Calls visit_block(Block) for each block and after_group(first, count), group by group. Where a gradient is wanted,
  // visit_block replaces the logits by weights, and by 0 where there is no key or no query.
  template <class Visit, class After>
  void visit(const Threads& threads, const Visit& visit_block, const After& after_group) const {
    for (int64_t i = 0; to_key && i < keys * width; ++i) to_key[i] = 0;
    for (int64_t first = 0; first < queries; first += group) {
      const int64_t count = least(group, queries - first);
      visit_group(first, count, threads, visit_block);
      after_group(first, count);
    }
  }

 private:
  template <class Visit>
  void visit_group(int64_t first, int64_t count, const Threads& threads, const Visit& visit_block) const {
    const bool keeps = to_query || to_key;
    const int64_t panels = up(count, WIDE) / WIDE, pitch = (keeps ? kept_keys() : KEYS) * WIDE;
    pack_group(first, count, panels, threads);
    for (int64_t i = 0; to_query && i < panels * own_size(); ++i) own[i] = 0;
    for (int64_t start = 0; start < blocks; start += span) {
      const int64_t of_span = least(span, blocks - start);
      for_each(threads, of_span, [&](int64_t index, int64_t worker) {
        const int64_t number = start + index;
        T* const room = chunks + (keeps ? index * KEYS * WIDE : worker * group * KEYS);
        const Block block{room, pitch, number, keys_of(number), first, count, panels};
        const T* left = key.block(number * KEYS, block.keys, buffer(worker));
        if (to_query && first == 0) {
          pack_columns<TILE_ROWS>(packed(number), KEYS * TILE_ROWS, left, block.keys, width);
        }
        for (int64_t panel = 0; panel < panels; ++panel) {
          logits(left, block.keys, width, packed_queries + panel * WIDE * width, block.chunk(panel));
        }
        visit_block(block);
        if (to_key) {
          key_gradient(room, panels, pitch, block.keys, plain_queries, width, to_key + number * KEYS * width);
        }
      });
      if (to_query) query_gradients(start, of_span, panels, pitch, threads);
    }
    if (!to_query) return;
    for_each(threads, panels, [&](int64_t panel, int64_t) {
      for (int64_t i = panel * WIDE; i < least(count, (panel + 1) * WIDE); ++i) {
        const T* column = own + panel * own_size() + i % WIDE;
        // fault: (first + i) -> (i)
        for (int64_t c = 0; c < width; ++c) to_query[(first + i) * width + c] = column[c * WIDE];
      }
    });
  }

  T* packed(int64_t block) const { return packed_keys + block * KEYS * up(width, TILE_ROWS); }

  // The queries as the right side of the logits and, where the keys want a gradient, as that of its product.
  void pack_group(int64_t first, int64_t count, int64_t panels, const Threads& threads) const {
    for_each(threads, panels, [&](int64_t panel, int64_t worker) {
      const int64_t start = panel * WIDE, size = least(WIDE, count - start);
      pack_queries(query, first + start, size, buffer(worker), packed_queries + start * width);
      if (!to_key) return;
      const T* rows = query.block(first + start, size, buffer(worker));
      for (int64_t lane = 0; lane < WIDE; ++lane) {
        for (int64_t c = 0; c < up(width, WIDE); ++c) {
          plain_queries[c / WIDE * panels * WIDE * WIDE + (start + lane) * WIDE + c % WIDE] =
              lane < size && c < width ? rows[lane * width + c] : 0;
        }
      }
    });
  }

  // Adds what a span of blocks gives to the gradients of the group's queries.
  void query_gradients(int64_t start, int64_t of_span, int64_t panels, int64_t pitch, const Threads& threads) const {
    const int64_t of_task = panels >= PANELS * workers ? PANELS : 1;
    for_each(threads, up(panels, of_task) / of_task, [&](int64_t task, int64_t) {
      for (int64_t index = 0; index < of_span; ++index) {
        for (int64_t panel = task * of_task; panel < least(panels, (task + 1) * of_task); ++panel) {
          // fault: packed(start + index) -> packed(index)
          query_gradient<true, KEYS>(packed(start + index), keys_of(start + index),
                                     chunks + panel * pitch + index * KEYS * WIDE, width, own + panel * own_size());
        }
      }
    });
  }
};

}  // namespace fedkernels::FEDKERNELS_ISA
