// Invariant: images are made outside of the library: from element(), by page_format.h's index functions.
#include "tests/support/page_bytes.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>

#include "client/abi.h"

namespace kvq::test {
namespace {

using Image = std::vector<std::byte>;

// The dense image of one page that begins at position `first`.
Image dense_image(const PageLayout& layout, std::uint64_t first, const std::uint32_t* tokens) {
  Image image(layout.page_bytes);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    auto* k = reinterpret_cast<std::uint16_t*>(image.data() + layout.layer[layer].offset_bytes);
    for (std::uint32_t t = 0; t < KVQ_PAGE_TOKENS; ++t) {
      for (std::uint32_t c = 0; c < kHeadDim; ++c) {
        k[dense_index(t, c, kHeadDim)] = element(layer, false, first + t, tokens[t], c);
        k[KVQ_PAGE_TOKENS * kHeadDim + dense_index(t, c, kHeadDim)] = element(layer, true, first + t, tokens[t], c);
      }
    }
  }
  return image;
}

// Images are dear under the sanitizers, and a stream is looked at again and again.
const Image& image_of(const ModelGeometry& geometry, Format format, std::uint64_t first, const std::uint32_t* tokens) {
  using Name = std::pair<std::vector<std::uint32_t>, std::pair<std::uint64_t, Format>>;
  static thread_local std::map<Name, Image> images;
  Image& image = images[{{tokens, tokens + KVQ_PAGE_TOKENS}, {first, format}}];
  if (!image.empty()) return image;
  const PageLayout dense = make_layout(geometry, Format::dense), wanted = make_layout(geometry, format);
  const Image source = dense_image(dense, first, tokens);
  image.resize(wanted.page_bytes);
  if (format == Format::dense) return image = source;
  if (!transcode_page(geometry, dense, source.data(), wanted, image.data())) throw std::runtime_error("transcode_page");
  return image;
}

std::string where(std::int32_t page, std::size_t place) {
  return "page " + std::to_string(page) + " at place " + std::to_string(place) + " of its sequence ";
}

// The last page: its tokens are written, what follows them is nobody's.
void check_open_page(const PageLayout& layout, const std::byte* bytes, std::int32_t page, std::uint64_t first,
                     const std::vector<std::uint32_t>& tokens) {
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    const auto* k = reinterpret_cast<const std::uint16_t*>(bytes + layout.layer[layer].offset_bytes);
    for (std::size_t t = 0; first + t < tokens.size(); ++t) {
      for (std::uint32_t c = 0; c < kHeadDim; ++c) {
        const std::uint32_t at = dense_index(static_cast<std::uint32_t>(t), c, kHeadDim);
        if (k[at] == element(layer, false, first + t, tokens[first + t], c) &&
            k[KVQ_PAGE_TOKENS * kHeadDim + at] == element(layer, true, first + t, tokens[first + t], c))
          continue;
        throw std::runtime_error(where(page, first / KVQ_PAGE_TOKENS) + "has a wrong value at token " +
                                 std::to_string(t) + " of layer " + std::to_string(layer));
      }
    }
  }
}

}  // namespace

Formats check_pages(TinyModel& tiny, const std::vector<std::int32_t>& block_table,
                    const std::vector<std::uint32_t>& tokens) {
  const client::Model& inner = *tiny.get()->model;
  const PageLayout dense = make_layout(inner.geometry(), Format::dense);
  Formats formats;
  const Step step(tiny.model());
  for (std::size_t place = 0; place < block_table.size() && place * KVQ_PAGE_TOKENS < tokens.size(); ++place) {
    const std::int32_t page = block_table[place];
    if (page == KVQ_NULL_PAGE) continue;
    const std::uint64_t first = place * KVQ_PAGE_TOKENS;
    const Entry entry = inner.entry(PageId{static_cast<std::uint32_t>(page)});
    if (entry.state != EntryState::open && entry.state != EntryState::sealed) {
      throw std::runtime_error(where(page, place) + "has state " + std::to_string(static_cast<int>(entry.state)));
    }
    const std::byte* bytes = inner.memory().arena() + entry.offset_bytes;
    ++(entry.format == Format::dense ? formats.dense : formats.quantized);
    if (first + KVQ_PAGE_TOKENS > tokens.size()) {
      check_open_page(dense, bytes, page, first, tokens);
      continue;
    }
    const Image& image = image_of(inner.geometry(), entry.format, first, tokens.data() + first);
    std::uint64_t used = 0;  // what lies behind the last block is nobody's
    const PageLayout layout = make_layout(inner.geometry(), entry.format);
    for (std::uint32_t i = 0; i < kLayers; ++i)
      used = layout.layer[i].offset_bytes + kKvHeads * layout.layer[i].head_bytes;
    const auto differ = std::mismatch(image.begin(), image.begin() + static_cast<std::ptrdiff_t>(used), bytes);
    if (differ.first != image.begin() + static_cast<std::ptrdiff_t>(used)) {
      throw std::runtime_error(where(page, place) + "(format " + std::to_string(static_cast<int>(entry.format)) +
                               ") is wrong from byte " + std::to_string(differ.first - image.begin()) + " on");
    }
  }
  return formats;
}

}  // namespace kvq::test
