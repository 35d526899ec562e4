// Goal: the functions of OpenSSL that are found at run time have the types that its headers give them. Method: where this host
// has the headers the compiler compares; otherwise the test says that it did not.
#include "core/tls/openssl.h"
#include "tests/check.h"

#if __has_include(<openssl/ssl.h>) && __has_include(<openssl/x509v3.h>)
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include <type_traits>

#if OPENSSL_VERSION_MAJOR == 3
#define X(name, result, arguments) \
  static_assert(std::is_same_v<decltype(&::name), decltype(kv::peer::OpenSsl::name)>, #name " has another type");
KV_OPENSSL(X)
#undef X
#define COMPARED true
#endif
#endif

TEST(the_functions_of_openssl_have_the_types_that_its_headers_say) {
#ifdef COMPARED
  CHECK(SSL_CTRL_SET_MIN_PROTO_VERSION == 123 && SSL_CTRL_SET_SESS_CACHE_MODE == 44 && TLS1_3_VERSION == 0x0304);
  CHECK(SSL_VERIFY_PEER == 1 && SSL_VERIFY_FAIL_IF_NO_PEER_CERT == 2 && SSL_FILETYPE_PEM == 1);
  CHECK(SSL_ERROR_SSL == 1 && SSL_ERROR_WANT_READ == 2 && SSL_ERROR_ZERO_RETURN == 6);
  CHECK(X509_CHECK_FLAG_NO_WILDCARDS == 0x2 && X509_CHECK_FLAG_NEVER_CHECK_SUBJECT == 0x20);
  CHECK(BIO_CTRL_FLUSH == 11 && BIO_FLAGS_READ == 1 && BIO_FLAGS_SHOULD_RETRY == 8 && BIO_TYPE_SOURCE_SINK == 0x400);
  CHECK(SSL_KEY_UPDATE_NOT_REQUESTED == 0);
  CHECK(SSL_R_DECRYPTION_FAILED_OR_BAD_RECORD_MAC == 281 && SSL_AD_REASON_OFFSET == 1000);
#else
  std::puts("skipped: no headers of OpenSSL 3 on this host");
#endif
}
