#include "checksum.h"

#include <algorithm>

#if __has_include(<xxhash.h>)
#define NVME_OFFLOAD_HAVE_XXHASH
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif

namespace nvme_offload {

#ifdef NVME_OFFLOAD_HAVE_XXHASH

bool has_checksum() noexcept { return true; }

std::uint64_t checksum_block(const std::byte* data, std::uint64_t nbytes, std::uint64_t begin,
                             std::uint64_t offset) noexcept {
  constexpr std::uint64_t kPiece = 4096;
  std::uint64_t sum = 0;
  for (std::uint64_t done = 0; done < nbytes;) {
    const std::uint64_t place = begin + done;
    const std::uint64_t piece = std::min(nbytes - done, kPiece - (offset + place) % kPiece);
    sum += XXH3_64bits(data + done, piece) * (2 * place + 1);
    done += piece;
  }
  return sum;
}

std::optional<std::pair<std::uint64_t, std::uint64_t>> fingerprint(const std::byte* data,
                                                                   std::size_t nbytes) noexcept {
  const XXH128_hash_t hash = XXH3_128bits(data, nbytes);
  return std::pair{std::uint64_t{hash.low64}, std::uint64_t{hash.high64}};
}

#else

bool has_checksum() noexcept { return false; }

std::uint64_t checksum_block(const std::byte*, std::uint64_t, std::uint64_t,
                             std::uint64_t) noexcept {
  return 0;
}

std::optional<std::pair<std::uint64_t, std::uint64_t>> fingerprint(const std::byte*,
                                                                   std::size_t) noexcept {
  return std::nullopt;
}

#endif

}  // namespace nvme_offload
