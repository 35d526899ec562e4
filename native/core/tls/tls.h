// TLS 1.3 over a channel's socket, both ends with a certificate: TlsIdentity is who this daemon is and whom it believes,
// TlsStream one connection. The stream keeps what it encrypted until the channel sends it, and receives by itself. Never waits.
//
// Invariants: a stream whose handshake is done has a certificate of the authority at its other end; a private key is read
// when an identity is made, and stays in it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

struct ssl_st;
struct ssl_ctx_st;
struct bio_st;

namespace kv::peer {

struct TlsFiles {  // PEM
  std::string certificate, key, authority;
};

// Encrypted under one key; then the connection goes on under the next. AES-GCM stands for 2^24.5 full records (RFC 8446, 5.5).
inline constexpr uint64_t kRecordsPerKey = 1 << 23;

class TlsIdentity {
 public:
  // Throws InvalidArgument that names the file, Unavailable without OpenSSL.
  explicit TlsIdentity(const TlsFiles& files, uint64_t records_per_key = kRecordsPerKey);
  void read_again(const TlsFiles& files);  // the same; what was read before then stays
  std::shared_ptr<ssl_ctx_st> context() const;
  // Why peers refuse it as this node's now: it bears other names, or its time has not come, or is over. Empty: not for these.
  std::string doubt(const std::string& node) const;
  uint64_t generation() const { return generation_; }  // of what was read last
  uint64_t records_per_key() const { return records_per_key_; }

 private:
  const uint64_t records_per_key_;
  mutable std::mutex mutex_;  // guards context_
  std::shared_ptr<ssl_ctx_st> context_;
  std::atomic<uint64_t> generation_{1};
};

class TlsStream {
 public:
  // `node`: as the one that connects, whose name the certificate over there must bear; empty as the one that was called.
  TlsStream(int socket, const TlsIdentity& identity, const std::string& node);
  ~TlsStream();
  TlsStream(const TlsStream&) = delete;

  bool handshake();  // false: more has to come. What out() has is to be sent either way. Throws Broken
  // Bytes received, 0 at the end; -1 and errno as recv(). Throws Broken.
  ssize_t receive(std::byte* to, size_t bytes);
  bool buffered() const;                   // something came that nobody has asked for
  bool is(const std::string& node) const;  // the certificate at the other end bears the name

  void encrypt(std::span<const std::byte> bytes);      // into out(). Throws Broken
  void finish();                                       // no more follows at once: what makes no full record makes one
  std::vector<std::byte>& out() { return out_; }       // to be sent, and cleared
  uint64_t generation() const { return generation_; }  // of the identity, as it counts its reloads

 private:
  static int give(bio_st* bio, const char* bytes, int n);
  static int get(bio_st* bio, char* to, int n);
  static long control(bio_st* bio, int what, long, void*);
  ssl_st* begin(const std::string& node);
  [[noreturn]] void failed();
  void write(std::span<const std::byte> bytes);

  const int socket_;
  const uint64_t generation_;  // taken before the context: never newer than it
  const uint64_t records_per_key_;
  const std::shared_ptr<ssl_ctx_st> context_;
  ssl_st* const ssl_;
  std::vector<std::byte> in_, out_, staged_;
  size_t in_at_ = 0, in_end_ = 0;
  uint64_t records_ = 0;  // under the key that encrypts now
  bool ended_ = false;
};

}  // namespace kv::peer
