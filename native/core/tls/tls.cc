#include "core/tls/tls.h"

#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "core/base/error.h"
#include "core/peer/channel.h"
#include "core/tls/openssl.h"

namespace kv::peer {
namespace {

constexpr size_t kRecordBytes = 16 << 10;  // the largest that TLS has
constexpr size_t kInBytes = 128 << 10;
// Of <openssl/ssl.h>, <openssl/bio.h>, <openssl/x509v3.h>: parts of the binary interface.
constexpr int kSetSessionCache = 44, kSetMinVersion = 123, kPem = 1;
constexpr long kTls13 = 0x0304;
constexpr int kVerifyPeer = 1, kFailWithoutCertificate = 2;
constexpr int kErrorSsl = 1, kErrorWantRead = 2, kErrorZeroReturn = 6;
constexpr unsigned kNoWildcards = 0x2, kNeverSubject = 0x20;
constexpr int kKeyUpdateNotRequested = 0;  // the other end counts what it sends itself
constexpr int kBioFlush = 11, kBioTypeSourceSink = 0x0400;
constexpr int kBioRead = 0x01, kBioRetry = 0x08;
constexpr unsigned long kReason = 0x7fffff, kAlert = 1000, kBadRecordMac = 281, kAlertBadRecordMac = kAlert + 20;

bio_st* new_bio(int (*give)(bio_st*, const char*, int), int (*get)(bio_st*, char*, int),
                long (*control)(bio_st*, int, long, void*), void* data) {
  const OpenSsl& o = openssl();
  static bio_method_st* const method = [&] {
    bio_method_st* made = o.BIO_meth_new(kBioTypeSourceSink | 127, "kvstored");
    KV_INVARIANT(made);
    o.BIO_meth_set_write(made, give), o.BIO_meth_set_read(made, get), o.BIO_meth_set_ctrl(made, control);
    return made;
  }();
  bio_st* bio = o.BIO_new(method);
  KV_INVARIANT(bio);
  o.BIO_set_data(bio, data), o.BIO_set_init(bio, 1);
  return bio;
}

std::string last_error() {
  const OpenSsl& o = openssl();
  const char* text = o.ERR_reason_error_string(o.ERR_get_error());
  o.ERR_clear_error();
  return text ? text : "no reason is known";
}

int no_password(char*, int, int, void*) { return 0; }  // else OpenSSL asks for it at a terminal

bool bears(x509_st* certificate, const std::string& node) {
  return openssl().X509_check_host(certificate, node.data(), node.size(), kNoWildcards | kNeverSubject, nullptr) == 1;
}

std::shared_ptr<ssl_ctx_st> read(const TlsFiles& files) {
  const OpenSsl& o = openssl();
  o.ERR_clear_error();
  std::shared_ptr<ssl_ctx_st> context(o.SSL_CTX_new(o.TLS_method()), o.SSL_CTX_free);
  if (!context) throw Error(Code::Unavailable, "TLS: " + last_error());
  ssl_ctx_st* c = context.get();
  const auto wanted = [](int done, const std::string& what) {
    if (done != 1) throw Error(Code::InvalidArgument, what + ": " + last_error());
  };
  wanted(static_cast<int>(o.SSL_CTX_ctrl(c, kSetMinVersion, kTls13, nullptr)), "TLS 1.3");
  o.SSL_CTX_ctrl(c, kSetSessionCache, 0, nullptr);
  o.SSL_CTX_set_num_tickets(c, 0);
  wanted(o.SSL_CTX_set_ciphersuites(c, "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256"), "ciphers");
  o.SSL_CTX_set_verify(c, kVerifyPeer | kFailWithoutCertificate, nullptr);
  o.SSL_CTX_set_default_passwd_cb(c, no_password);
  wanted(o.SSL_CTX_load_verify_locations(c, files.authority.c_str(), nullptr), "tls_ca: " + files.authority);
  wanted(o.SSL_CTX_use_certificate_chain_file(c, files.certificate.c_str()), "tls_cert: " + files.certificate);
  wanted(o.SSL_CTX_use_PrivateKey_file(c, files.key.c_str(), kPem), "tls_key: " + files.key);
  wanted(o.SSL_CTX_check_private_key(c), "tls_key: " + files.key);
  return context;
}

}  // namespace

TlsIdentity::TlsIdentity(const TlsFiles& files, uint64_t records_per_key)
    : records_per_key_(records_per_key), context_(read(files)) {}

void TlsIdentity::read_again(const TlsFiles& files) {
  auto fresh = read(files);
  std::lock_guard lock(mutex_);
  context_ = std::move(fresh);
  ++generation_;
}

std::shared_ptr<ssl_ctx_st> TlsIdentity::context() const {
  std::lock_guard lock(mutex_);
  return context_;
}

std::string TlsIdentity::doubt(const std::string& node) const {
  const OpenSsl& o = openssl();
  const std::shared_ptr<ssl_ctx_st> kept = context();
  x509_st* certificate = o.SSL_CTX_get0_certificate(kept.get());
  if (!bears(certificate, node)) return "tls_cert: no DNS name in it is '" + node + "'";
  if (o.X509_cmp_current_time(o.X509_get0_notBefore(certificate)) > 0) return "tls_cert: its time has not come";
  if (o.X509_cmp_current_time(o.X509_get0_notAfter(certificate)) < 0) return "tls_cert: it has expired";
  return {};
}

TlsStream::TlsStream(int socket, const TlsIdentity& identity, const std::string& node)
    : socket_(socket),
      generation_(identity.generation()),
      records_per_key_(identity.records_per_key()),
      context_(identity.context()),
      ssl_(begin(node)),
      in_(kInBytes) {}

ssl_st* TlsStream::begin(const std::string& node) {
  const OpenSsl& o = openssl();
  ssl_st* made = o.SSL_new(context_.get());
  if (!made) throw Broken(Broken::Why::Gone, "TLS: " + last_error());
  bio_st* bio = new_bio(give, get, control, this);
  o.SSL_set_bio(made, bio, bio);
  if (node.empty()) {
    o.SSL_set_accept_state(made);
  } else {
    o.SSL_set_hostflags(made, kNoWildcards | kNeverSubject);
    KV_INVARIANT(o.SSL_set1_host(made, node.c_str()) == 1);  // copies a name
    o.SSL_set_connect_state(made);
  }
  return made;
}

TlsStream::~TlsStream() { openssl().SSL_free(ssl_); }

// ---------------------------------------------------------------- below TLS

int TlsStream::give(bio_st* bio, const char* bytes, int n) {
  auto& self = *static_cast<TlsStream*>(openssl().BIO_get_data(bio));
  const auto* from = reinterpret_cast<const std::byte*>(bytes);
  self.out_.insert(self.out_.end(), from, from + n);
  return n;
}

int TlsStream::get(bio_st* bio, char* to, int n) {
  const OpenSsl& o = openssl();
  auto& self = *static_cast<TlsStream*>(o.BIO_get_data(bio));
  o.BIO_clear_flags(bio, kBioRead | kBioRetry);
  if (self.in_at_ == self.in_end_) {
    ssize_t got;
    while ((got = ::recv(self.socket_, self.in_.data(), self.in_.size(), 0)) < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return o.BIO_set_flags(bio, kBioRead | kBioRetry), -1;
    if (got <= 0) return self.ended_ = true, 0;
    self.in_at_ = 0, self.in_end_ = static_cast<size_t>(got);
  }
  const size_t there = std::min<size_t>(static_cast<size_t>(n), self.in_end_ - self.in_at_);
  std::memcpy(to, self.in_.data() + self.in_at_, there);
  self.in_at_ += there;
  return static_cast<int>(there);
}

long TlsStream::control(bio_st*, int what, long, void*) { return what == kBioFlush; }

// ---------------------------------------------------------------- above

// What went wrong, in words for who looks at `kvstored peers`.
void TlsStream::failed() {
  const OpenSsl& o = openssl();
  const unsigned long code = o.ERR_get_error(), reason = code & kReason;
  const char* text = o.ERR_reason_error_string(code);
  o.ERR_clear_error();
  if (ended_ && !code) throw Broken(Broken::Why::Gone, "it hung up");
  if (const long verified = o.SSL_get_verify_result(ssl_))
    throw Broken(Broken::Why::Refused, std::string("its certificate: ") + o.X509_verify_cert_error_string(verified));
  const std::string what = std::string("TLS: ") + (text ? text : ended_ ? "it hung up" : "no reason is known");
  if (reason == kBadRecordMac || reason == kAlertBadRecordMac) throw Broken(Broken::Why::Corrupt, what);
  if (reason > kAlert && reason < kAlert + 256) throw Broken(Broken::Why::Refused, what);
  throw Broken(ended_ ? Broken::Why::Gone : Broken::Why::Malformed, what);
}

bool TlsStream::handshake() {
  const OpenSsl& o = openssl();
  o.ERR_clear_error();
  const int done = o.SSL_do_handshake(ssl_);
  if (done == 1) return true;
  if (o.SSL_get_error(ssl_, done) == kErrorWantRead) return false;
  failed();
}

ssize_t TlsStream::receive(std::byte* to, size_t bytes) {
  const OpenSsl& o = openssl();
  o.ERR_clear_error();
  const int got = o.SSL_read(ssl_, to, static_cast<int>(std::min<size_t>(bytes, 1 << 30)));
  if (got > 0) return got;
  const int why = o.SSL_get_error(ssl_, got);
  if (why == kErrorWantRead) return errno = EAGAIN, -1;
  if (why == kErrorZeroReturn || (ended_ && why != kErrorSsl)) return 0;
  failed();
}

bool TlsStream::buffered() const { return in_at_ != in_end_ || openssl().SSL_has_pending(ssl_); }

bool TlsStream::is(const std::string& node) const {
  const OpenSsl& o = openssl();
  x509_st* certificate = o.SSL_get1_peer_certificate(ssl_);
  const bool named = certificate && !node.empty() && bears(certificate, node);
  o.X509_free(certificate);
  return named;
}

void TlsStream::write(std::span<const std::byte> bytes) {
  const OpenSsl& o = openssl();
  o.ERR_clear_error();
  if (records_ >= records_per_key_) {  // goes out before what follows
    if (o.SSL_key_update(ssl_, kKeyUpdateNotRequested) != 1) failed();
    records_ = 0;
  }
  records_ += (bytes.size() + kRecordBytes - 1) / kRecordBytes;
  // All at once: what it encrypts goes to out_, which takes everything.
  if (o.SSL_write(ssl_, bytes.data(), static_cast<int>(bytes.size())) != static_cast<int>(bytes.size())) failed();
}

// Whole records straight from where the bytes lie; what is less is gathered, a frame's head with its payload.
void TlsStream::encrypt(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    if (staged_.empty() && bytes.size() >= kRecordBytes) {
      const size_t whole = bytes.size() / kRecordBytes * kRecordBytes;
      write(bytes.first(whole));
      bytes = bytes.subspan(whole);
      continue;
    }
    const auto taken = bytes.first(std::min(bytes.size(), kRecordBytes - staged_.size()));
    staged_.insert(staged_.end(), taken.begin(), taken.end());
    bytes = bytes.subspan(taken.size());
    if (staged_.size() == kRecordBytes) finish();
  }
}

void TlsStream::finish() {
  if (!staged_.empty()) write(staged_);
  staged_.clear();
}

}  // namespace kv::peer
