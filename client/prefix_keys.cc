// Invariant: every field enters the hash behind its domain tag with its length, integers little-endian.
#include "client/prefix_keys.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <bit>
#include <cstring>

#include "kvq/result.h"

namespace kvq::client {
namespace {

static_assert(std::endian::native == std::endian::little, "keys hash integers as they lie in memory");
static_assert(sizeof(LayerSpec) == 6, "a layer's bytes are hashed without padding");

constexpr char kModelTag[] = "kvq model 1";

template <typename T>
void put(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void put_model(std::string& bytes, std::span<const std::uint8_t, 32> fingerprint, const ModelGeometry& geometry) {
  bytes.append(reinterpret_cast<const char*>(fingerprint.data()), fingerprint.size());
  put(bytes, kPageTokens);
  put(bytes, geometry.layers);
  for (std::uint32_t i = 0; i < geometry.layers; ++i) put(bytes, geometry.layer[i]);
}

bool overlaps(const ExtraKey& extra, std::uint64_t page) {
  const std::uint64_t begin = page * kPageTokens, end = begin + kPageTokens;
  return extra.tokens != 0 && extra.first_token < end &&
         (extra.first_token >= begin || begin - extra.first_token < extra.tokens);
}

}  // namespace

struct PrefixHasher::Digest {
  EVP_MD* md = nullptr;
  EVP_MD_CTX* context = nullptr;
};

PrefixHasher::PrefixHasher() : digest_(std::make_unique<Digest>()) {
  // The library inside libkvq reads no configuration file of the host and registers no exit handler in it.
  OPENSSL_init_crypto(OPENSSL_INIT_NO_LOAD_CONFIG | OPENSSL_INIT_NO_ATEXIT, nullptr);
  digest_->md = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  digest_->context = EVP_MD_CTX_new();
  KVQ_ASSERT(digest_->md != nullptr && digest_->context != nullptr);
  KVQ_ASSERT(EVP_DigestInit_ex2(digest_->context, digest_->md, nullptr) == 1);
}

PrefixHasher::~PrefixHasher() {
  EVP_MD_CTX_free(digest_->context);
  EVP_MD_free(digest_->md);
}

Key PrefixHasher::hash(const std::string& bytes) {
  Key key;
  KVQ_ASSERT(EVP_DigestInit_ex2(digest_->context, nullptr, nullptr) == 1);
  KVQ_ASSERT(EVP_DigestUpdate(digest_->context, bytes.data(), bytes.size()) == 1);
  KVQ_ASSERT(EVP_DigestFinal_ex(digest_->context, key.data(), nullptr) == 1);
  return key;
}

Key PrefixHasher::root(std::span<const std::uint8_t, 32> salt, std::span<const std::uint8_t, 32> fingerprint,
                       const ModelGeometry& geometry) {
  scratch_.assign(kRootTag, sizeof(kRootTag));
  scratch_.append(reinterpret_cast<const char*>(salt.data()), salt.size());
  put_model(scratch_, fingerprint, geometry);
  return hash(scratch_);
}

Key PrefixHasher::model_digest(std::span<const std::uint8_t, 32> fingerprint, const ModelGeometry& geometry) {
  scratch_.assign(kModelTag, sizeof(kModelTag));
  put_model(scratch_, fingerprint, geometry);
  return hash(scratch_);
}

Key PrefixHasher::page(const Key& parent, std::uint64_t page, const std::uint32_t* tokens,
                       std::span<const ExtraKey> extra_keys) {
  scratch_.assign(kPageTag, sizeof(kPageTag));
  scratch_.append(reinterpret_cast<const char*>(parent.data()), parent.size());
  scratch_.append(reinterpret_cast<const char*>(tokens), kPageTokens * sizeof(std::uint32_t));
  for (const ExtraKey& extra : extra_keys) {
    if (!overlaps(extra, page)) continue;
    scratch_.push_back('x');
    put(scratch_, static_cast<std::uint32_t>(extra.data.size()));
    scratch_.append(extra.data);
  }
  return hash(scratch_);
}

PrefixHasher& thread_hasher() {
  thread_local PrefixHasher hasher;
  return hasher;
}

}  // namespace kvq::client
