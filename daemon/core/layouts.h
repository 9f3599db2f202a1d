// The layout registry: which model geometries the daemon knows, and the page layout of each in each format.
//
// Invariant: a model's number and the addresses of its geometry and layouts stay the same while anything uses them,
// since jobs on other threads point at them. Number 0 is no model.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kvq/page_format.h"
#include "kvq/result.h"

namespace kvq {

// Durable: lies in a daemon-private memfd, by model number. The geometry is written while `live` is 0.
struct ModelRecord {
  ModelGeometry geometry;
  std::uint32_t live;
};

class Layouts {
 public:
  // `records`: all zero, or checked (check_geometry, each); they outlive the registry.
  explicit Layouts(std::span<ModelRecord> records);

  // The geometry's number, new or known. `in_use(model)` tells which numbers may not be given to another geometry.
  template <typename InUse>
  Result<std::uint16_t> intern(const ModelGeometry& geometry, InUse in_use) {
    std::optional<std::uint16_t> place;
    for (std::uint16_t i = 1; i < records_.size(); ++i) {
      if (records_[i].live != 0 && records_[i].geometry == geometry) return i;
      if (records_[i].live == 0 && !place) place = i;
    }
    for (std::uint16_t i = 1; i < records_.size() && !place; ++i) {
      if (!in_use(i)) place = i;
    }
    if (!place) return Error{Errc::limit_reached, 0, "too many different model geometries are registered"};
    put(*place, geometry);
    return *place;
  }

  const ModelGeometry& geometry(std::uint16_t model) const { return records_[model].geometry; }
  const PageLayout& layout(std::uint16_t model, Format format) const {
    return layouts_[model][static_cast<std::size_t>(format)];
  }
  std::uint16_t capacity() const { return static_cast<std::uint16_t>(records_.size()); }
  bool live(std::uint16_t model) const { return model != 0 && model < records_.size() && records_[model].live != 0; }
  static LayoutId id(std::uint16_t model, Format format) {
    return LayoutId{model * kFormatCount + static_cast<std::uint32_t>(format)};
  }
  static std::uint16_t model_of(LayoutId layout) { return static_cast<std::uint16_t>(raw(layout) / kFormatCount); }
  static Format format_of(LayoutId layout) { return static_cast<Format>(raw(layout) % kFormatCount); }

 private:
  void put(std::uint16_t model, const ModelGeometry& geometry);
  void make_layouts(std::uint16_t model);

  std::span<ModelRecord> records_;
  std::vector<std::unique_ptr<PageLayout[]>> layouts_;
};

// Why this geometry cannot be served, or ok.
Error check_geometry(const ModelGeometry& geometry, std::uint64_t slab_bytes);

}  // namespace kvq
