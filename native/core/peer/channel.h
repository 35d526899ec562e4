// A connection to another daemon: frames out, gathered into few system calls, and frames in, large payloads straight to where
// they belong. Owns the socket. Every wait has a deadline: a peer that stalls, trickles or sends what is no frame ends the
// connection by a Broken, never a wait.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/base/polling.h"
#include "core/format/segment.h"
#include "core/peer/wire.h"
#include "core/tls/tls.h"

namespace kv::peer {

inline constexpr int kStallMs = 1500;  // without a byte
inline constexpr uint64_t kNsPerMs = 1'000'000;

// The connection is of no more use.
struct Broken : std::runtime_error {
  enum class Why { Gone, Stalled, Malformed, Corrupt, Refused, Unwanted };  // Unwanted: by us, nobody waits for what comes
  Broken(Why why, const std::string& text) : std::runtime_error(text), why(why) {}
  Why why;
};
[[noreturn]] inline void malformed(const char* what) { throw Broken(Broken::Why::Malformed, what); }

class Channel {
 public:
  explicit Channel(Fd socket);
  // To a numeric IPv4 address. Throws Broken.
  static Channel connect(const std::string& address, uint16_t port, int timeout_ms);

  // TLS from here on; `node` as TlsStream has it. Before the first frame. Throws Broken.
  void secure(const TlsIdentity& identity, const std::string& node, int timeout_ms);
  // Whether the other end's certificate bears the name; without TLS nothing speaks against it.
  bool certified(const std::string& node) const { return !tls_ || tls_->is(node); }
  bool secured() const { return tls_ != nullptr; }                       // what passes is TLS
  uint64_t generation() const { return tls_ ? tls_->generation() : 0; }  // of the identity it was secured with

  // Queued until flush(), or until much is queued. The bytes of a payload that is not copied stay where they are until then.
  void put(Frame head, std::span<const std::byte> payload, bool copy = true);
  // The same, of bytes whose checksum is known.
  void put_summed(Frame head, std::span<const std::byte> payload);
  void flush();  // sends what is queued. Throws Broken

  Frame take_head(int timeout_ms = kStallMs);                             // -1: no limit until its first byte
  void take(std::byte* to, uint64_t bytes);                               // of the payload, all of them. Throws Broken
  uint32_t take_summed(std::byte* to, uint64_t bytes, uint32_t crc = 0);  // the CRC32C of what came, behind that
  void skip(uint64_t bytes);                                              // of the payload, unread. Throws Broken
  // A whole frame of one kind whose payload is a T. Throws Broken if another comes.
  template <class T>
  T take_value(Kind kind, int timeout_ms = kStallMs) {
    const Frame head = take_head(timeout_ms);
    expect(head, kind, sizeof(T));
    T value;
    take_checked(head, reinterpret_cast<std::byte*>(&value));
    return value;
  }
  void take_checked(const Frame& head, std::byte* to);               // throws Broken if the checksum differs
  static void expect(const Frame& head, Kind kind, uint64_t bytes);  // throws Broken if it is another frame

  bool buffered() const { return in_at_ != in_end_; }  // more has come already
  bool hung_up() const;                                // the other end is gone, or said what nobody asked for
  void cut() const;                                    // from any thread: whoever waits on it gets Broken
  void hear_no_more() const;                           // the same, but what has come already is heard, and can be answered
  int fd() const { return socket_.get(); }             // to poll
  // That the other end's words last came in on, plus 1, where that end is on this host too: it runs there. Else 0.
  uint32_t beside() const;

 private:
  size_t receive(std::byte* to, size_t bytes, uint64_t end_ns, int stall_ms, bool head_follows = false);
  bool look_on(uint64_t& until_ns);
  uint32_t incoming() const;
  void take_rest(std::byte* to, uint64_t bytes, bool direct, bool head_follows);
  void append(Frame head, std::span<const std::byte> payload);
  void send(std::span<iovec> parts, uint64_t end_ns);
  void send_encrypted(uint64_t end_ns);

  Fd socket_;
  std::unique_ptr<TlsStream> tls_;
  std::vector<std::byte> in_;  // what came beyond what was asked for
  size_t in_at_ = 0, in_end_ = 0;
  bool large_ = false;  // so was the last payload: of what comes next the head alone is received into in_
  Polling looks_;
  std::vector<std::byte> out_;  // heads and copied payloads; never grows
  std::vector<iovec> parts_;
  uint64_t queued_ = 0;
};

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return {reinterpret_cast<const std::byte*>(&value), sizeof(T)};
}

}  // namespace kv::peer
