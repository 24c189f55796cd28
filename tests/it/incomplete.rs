//! Messages that end too early or are none (RFC 9112 sections 6.3, 8 and 9.8): never a short success.

use idempool::{CloseReason, Delivery, ErrorKind, Phase};

use crate::support::{
    BOTH, Conn, Gate, Peer, Scheme, eventually, fetch, get, pool, read, read_until_error,
};

/// How a script ends its side.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum End {
    /// A FIN, and over TLS nothing before it.
    Fin,
    /// Over TLS a close_notify, then a FIN.
    Proper,
}

impl End {
    fn of(self, conn: &mut Conn) {
        if self == End::Proper {
            conn.close_notify();
        }
        conn.fin();
    }
}

/// A peer whose first connection answers with this and ends, and whose others behave.
fn first_sends(scheme: Scheme, answer: impl Into<Vec<u8>>, end: End) -> Peer {
    let answer = answer.into();
    Peer::start(scheme, move |conn| {
        if conn.index > 0 {
            conn.answer_requests(usize::MAX);
        } else if conn.read_request().is_some() {
            conn.send(&answer);
            end.of(conn);
            conn.await_end();
        }
    })
}

const SCHEMES_AND_ENDS: [(Scheme, End); 3] = [
    (Scheme::Http, End::Fin),
    (Scheme::Https, End::Fin),
    (Scheme::Https, End::Proper),
];

/// The response arrives in part: those bytes, then an error, and the connection is not used again.
async fn assert_cut_short(answer: &str, came: &str) {
    for (scheme, end) in SCHEMES_AND_ENDS {
        let row = format!("{scheme} {end:?} {answer:?}");
        let peer = first_sends(scheme, answer, end);
        let pool = pool();
        let response = pool.send(get(&peer.url("/"))).await.expect(&row);
        let (bytes, error) = read_until_error(response).await;
        assert_eq!(String::from_utf8_lossy(&bytes), came, "{row}");
        let error = error.expect(&row);
        assert_eq!(error.kind(), ErrorKind::ResponseBody, "{row}");
        assert_eq!(error.phase(), Phase::ResponseBody, "{row}");
        assert_eq!(error.delivery(), Delivery::Unknown, "{row}");
        assert!(error.response_started(), "{row}");
        assert_eq!(fetch(&pool, get(&peer.url("/"))).await.expect(&row), "1");
        eventually("the first is counted as failed", || {
            pool.stats().closes.get(CloseReason::ExchangeFailed) == 1
        })
        .await;
        assert_eq!(peer.accepted(), 2, "{row}");
    }
}

/// RFC 9112 sections 6.3 rule 6 and 8; almide/almide#1626.
#[tokio::test]
async fn a_body_short_of_its_length_gives_its_bytes_and_then_an_error() {
    assert_cut_short(
        "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n123456789",
        "123456789",
    )
    .await;
    assert_cut_short("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n", "").await;
}

/// RFC 9112 section 8.
#[tokio::test]
async fn a_chunked_body_without_its_last_chunk_gives_its_bytes_and_then_an_error() {
    let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_cut_short(&format!("{head}5\r\nhello\r\n5\r\nworld\r\n"), "helloworld").await;
    assert_cut_short(&format!("{head}5\r\nhello\r\n5\r\nwor"), "hellowor").await;
}

/// RFC 9112 section 7.1: recipients must not let a chunk size overflow.
#[tokio::test]
async fn a_chunk_size_that_no_number_holds_is_an_error() {
    let size = "F".repeat(17);
    let answer =
        format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{size}\r\nhello\r\n");
    assert_cut_short(&answer, "").await;
}

/// The reset may overtake the bytes before it, so only the error is promised.
#[tokio::test]
async fn a_body_that_is_reset_is_an_error() {
    for scheme in BOTH {
        let head_is_out = Gate::new();
        let gate = head_is_out.clone();
        let peer = Peer::start(scheme, move |conn| {
            if conn.read_request().is_some() {
                conn.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345");
                gate.pass();
                conn.rst();
            }
        });
        let pool = pool();
        let response = pool.send(get(&peer.url("/"))).await.expect("a head");
        head_is_out.open();
        let (_, error) = read_until_error(response).await;
        let error = error.expect("an error");
        assert_eq!(error.kind(), ErrorKind::ResponseBody, "{scheme}");
        assert_eq!(error.delivery(), Delivery::Unknown, "{scheme}");
    }
}

/// RFC 9112 section 8: the response had begun, which the error says; how far the request got is unknown
/// either way.
#[tokio::test]
async fn an_end_inside_the_head_is_told_apart_from_no_response() {
    for (scheme, end) in SCHEMES_AND_ENDS {
        for (answer, started) in [
            ("", false),
            ("H", true),
            ("HTTP/1.1 200 OK\r\n", true),
            ("HTTP/1.1 200 OK\r\nX: ", true),
        ] {
            let row = format!("{scheme} {end:?} {answer:?}");
            let peer = first_sends(scheme, answer, end);
            let pool = pool();
            let error = pool.send(get(&peer.url("/"))).await.expect_err(&row);
            assert_eq!(error.kind(), ErrorKind::ConnectionClosed, "{row}");
            assert_eq!(error.phase(), Phase::ResponseHead, "{row}");
            assert_eq!(error.delivery(), Delivery::Unknown, "{row}");
            assert_eq!(error.response_started(), started, "{row}");
            assert_eq!(error.is_reused(), Some(false), "{row}");
            assert!(error.bytes_taken() > 0, "{row}");
            assert_eq!(fetch(&pool, get(&peer.url("/"))).await.expect(&row), "1");
        }
    }
}

/// RFC 9112 section 9.8; rustls/hyper-rustls#162: many servers leave the close_notify out.
#[tokio::test]
async fn over_tls_a_body_complete_by_its_framing_needs_no_close_notify() {
    for (answer, body) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", ""),
        ("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody", "body"),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
            "body",
        ),
    ] {
        let peer = first_sends(Scheme::Https, answer, End::Fin);
        let pool = pool();
        let response = pool.send(get(&peer.url("/"))).await.expect(answer);
        assert_eq!(read(response).await.expect(answer), body);
    }
}

/// RFC 9112 sections 8 and 9.8; seanmonstar/reqwest#1769: what came is delivered first.
#[tokio::test]
async fn over_tls_a_body_that_ends_with_the_connection_is_complete_only_with_close_notify() {
    for (end, complete) in [(End::Proper, true), (End::Fin, false)] {
        for fields in ["", "Connection: close\r\n"] {
            let answer = format!("HTTP/1.1 200 OK\r\n{fields}\r\nuntil the end");
            let peer = first_sends(Scheme::Https, answer, end);
            let pool = pool();
            let response = pool.send(get(&peer.url("/"))).await.expect("a head");
            let (bytes, error) = read_until_error(response).await;
            assert_eq!(bytes, b"until the end", "{end:?}");
            let kind = error.map(|error| error.kind());
            assert_eq!(
                kind,
                (!complete).then_some(ErrorKind::ResponseBody),
                "{end:?}"
            );
            assert_eq!(
                fetch(&pool, get(&peer.url("/"))).await.expect("a response"),
                "1"
            );
        }
    }
}

/// RFC 9112 sections 4, 5 and 6.3 rule 5.
#[tokio::test]
async fn what_is_not_http_is_a_protocol_error_and_closes_the_connection() {
    for answer in [
        "SSH-2.0-OpenSSH_9.6\r\n\r\n",
        "\u{0}\u{1}\u{2}\r\n\r\n",
        "HTTP/1.1 abc\r\n\r\n",
        "HTTP/3.9 200 OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551616\r\n\r\nhello",
    ] {
        let peer = first_sends(Scheme::Http, answer, End::Fin);
        let pool = pool();
        let error = pool.send(get(&peer.url("/"))).await.expect_err(answer);
        assert_eq!(error.kind(), ErrorKind::Protocol, "{answer:?}");
        assert_eq!(error.delivery(), Delivery::Unknown, "{answer:?}");
        assert!(error.response_started(), "{answer:?}");
        assert_eq!(fetch(&pool, get(&peer.url("/"))).await.expect(answer), "1");
        eventually("counted", || {
            pool.stats().closes.get(CloseReason::ExchangeFailed) == 1
        })
        .await;
        assert_eq!(peer.accepted(), 2, "{answer:?}");
    }
}
