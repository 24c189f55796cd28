//! How connections end, seen from the other side.

use std::time::Duration;

use super::super::{Certificates, PaymentServer, RaceServer};
use super::client::{Got, Wire, get, keyed, once, post, trusting};
use super::{payments, start};

/// A connection to a server, of either kind.
async fn connect(server: &PaymentServer, tls: Option<&Certificates>) -> Wire {
    match tls {
        None => Wire::tcp(server.base_url()).await,
        Some(certificates) => {
            Wire::tls(server.base_url(), &trusting(certificates.authority())).await
        }
    }
}

fn without_and_with_tls() -> [Option<Certificates>; 2] {
    [None, Some(Certificates::generate().expect("certificates"))]
}

#[tokio::test]
async fn lost_answer_is_paid_once_and_replayed_to_the_retry() {
    for tls in without_and_with_tls() {
        for (how, end) in [("1", Got::Fin), ("rst", Got::Rst)] {
            let config = tls.as_ref().map(Certificates::server_config);
            let (server, _directory) = start(|options| options.tls = config).await;
            let request = keyed(&format!("/payments?lose={how}"));
            let mut wire = connect(&server, tls.as_ref()).await;
            assert_eq!(wire.exchange(&request).await, end, "tls: {}", tls.is_some());
            assert_eq!(payments(&server).await, 1);

            // The same request, byte for byte: an answer that is stored is not lost again.
            let mut wire = connect(&server, tls.as_ref()).await;
            let retry = wire.exchange(&request).await.reply();
            assert_eq!((retry.status, retry.replayed()), (201, true));
            assert_eq!(payments(&server).await, 1);
        }
    }
}

#[tokio::test]
async fn answer_lost_without_a_key_is_paid_again_by_the_retry() {
    let (server, _directory) = start(|_| {}).await;
    let request = |path| post(path, &[], "amount=10");
    assert_eq!(
        once(server.base_url(), &request("/payments?lose=1")).await,
        Got::Fin
    );
    assert_eq!(
        once(server.base_url(), &request("/payments"))
            .await
            .reply()
            .status,
        201
    );
    assert_eq!(payments(&server).await, 2);
}

#[tokio::test]
async fn answer_is_lost_on_a_reused_connection_too() {
    for (how, end) in [("1", Got::Fin), ("rst", Got::Rst)] {
        let (server, _directory) = start(|_| {}).await;
        let mut wire = Wire::tcp(server.base_url()).await;
        assert_eq!(wire.exchange(&get("/hello")).await.reply().body, b"hello");
        assert_eq!(
            wire.exchange(&keyed(&format!("/payments?lose={how}")))
                .await,
            end
        );
        let counts = server.counts().await.expect("counts");
        assert_eq!(
            (counts.connections, counts.requests, counts.payments),
            (1, 2, 1)
        );
    }
}

#[tokio::test]
async fn early_close_leaves_the_body_unread_and_pays_nothing() {
    for tls in without_and_with_tls() {
        let config = tls.as_ref().map(Certificates::server_config);
        let (server, _directory) = start(|options| options.tls = config).await;
        let mut wire = connect(&server, tls.as_ref()).await;
        assert_eq!(
            wire.exchange(&keyed("/payments?lose=early")).await,
            Got::Fin
        );
        // Also when more of the body is on its way than anyone has read: no reset.
        let large = post("/payments?lose=early", &[], &"x".repeat(500_000));
        let mut wire = connect(&server, tls.as_ref()).await;
        assert_eq!(wire.exchange(&large).await, Got::Fin);
        // Also when the body never comes.
        let head =
            "POST /payments?lose=early HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n";
        let mut wire = connect(&server, tls.as_ref()).await;
        assert_eq!(wire.exchange(head).await, Got::Fin);
        let counts = server.counts().await.expect("counts");
        assert_eq!(
            (counts.requests, counts.payments, counts.stored_answers),
            (3, 0, 0)
        );
    }
}

#[tokio::test]
async fn idle_connection_is_closed_in_order() {
    for tls in without_and_with_tls() {
        let config = tls.as_ref().map(Certificates::server_config);
        let (server, _directory) = start(|options| {
            options.tls = config;
            options.idle_timeout = Some(Duration::from_millis(200));
        })
        .await;
        let mut wire = connect(&server, tls.as_ref()).await;
        for _ in 0..2 {
            assert_eq!(wire.exchange(&get("/hello")).await.reply().status, 200);
        }
        assert_eq!(wire.read().await, Got::Fin, "tls: {}", tls.is_some());
        // One that never asks for anything is no different.
        assert_eq!(connect(&server, tls.as_ref()).await.read().await, Got::Fin);
    }
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn crossed_request_is_neither_read_nor_counted() {
    for tls in without_and_with_tls() {
        let config = tls.as_ref().map(Certificates::server_config);
        let (server, _directory) = start(|options| options.tls = config).await;
        let mut wire = connect(&server, tls.as_ref()).await;
        assert_eq!(wire.exchange(&get("/hello")).await.reply().status, 200);

        let crossing = server.cross().await.expect("a filter");
        wire.send(keyed("/payments").as_bytes()).await;
        // Longer than it takes to send it again: that is lost too.
        tokio::time::sleep(Duration::from_millis(300)).await;
        crossing.close().await;
        assert_eq!(wire.read().await, Got::Fin, "tls: {}", tls.is_some());

        // A connection that came later is none of its business.
        let mut wire = connect(&server, tls.as_ref()).await;
        assert_eq!(wire.exchange(&keyed("/payments")).await.reply().status, 201);
        let counts = server.counts().await.expect("counts");
        assert_eq!((counts.requests, counts.payments), (2, 1));
    }
}

#[tokio::test]
async fn dropped_server_closes_idle_connections_in_order() {
    for tls in without_and_with_tls() {
        let config = tls.as_ref().map(Certificates::server_config);
        let (server, _directory) = start(|options| options.tls = config).await;
        let mut wire = connect(&server, tls.as_ref()).await;
        assert_eq!(wire.exchange(&get("/hello")).await.reply().status, 200);
        drop(server);
        assert_eq!(wire.read().await, Got::Fin, "tls: {}", tls.is_some());
    }
}

#[tokio::test]
async fn resumed_handshake_is_told_from_a_full_one() {
    let certificates = Certificates::generate().expect("certificates");
    let (server, _directory) =
        start(|options| options.tls = Some(certificates.server_config())).await;
    let client = trusting(certificates.authority());
    for _ in 0..3 {
        let mut wire = Wire::tls(server.base_url(), &client).await;
        assert_eq!(wire.exchange(&get("/hello")).await.reply().status, 200);
    }
    let counts = server.counts().await.expect("counts");
    assert_eq!(
        (
            counts.connections,
            counts.full_handshakes,
            counts.resumed_handshakes
        ),
        (3, 1, 2)
    );
}

#[tokio::test]
async fn upload_takes_a_mebibyte_and_pays_nothing() {
    let (server, _directory) = start(|_| {}).await;
    let body = "x".repeat(1024 * 1024);
    for path in ["/upload", "/hello"] {
        let reply = once(server.base_url(), &post(path, &[], &body))
            .await
            .reply();
        assert_eq!(
            (reply.status, reply.body.as_slice()),
            (200, &b"1048576 bytes"[..])
        );
    }
    let reply = once(server.base_url(), &get("/payments")).await.reply();
    let counts = serde_json::json!({"payments": 0, "requests": 3, "connections": 3});
    assert_eq!(reply.json(), counts);
}

#[tokio::test]
async fn race_server_drops_the_connection_at_the_second_request() {
    for tls in without_and_with_tls() {
        let config = tls.as_ref().map(Certificates::server_config);
        let server = RaceServer::start(config).await.expect("a listener");
        let connect = async || match &tls {
            None => Wire::tcp(server.base_url()).await,
            Some(certificates) => {
                Wire::tls(server.base_url(), &trusting(certificates.authority())).await
            }
        };
        let mut wire = connect().await;
        assert_eq!(wire.exchange(&keyed("/payments")).await.reply().status, 201);
        let end = wire.exchange(&keyed("/payments")).await;
        assert!(matches!(end, Got::Rst | Got::Truncated), "{end:?}");

        // A GET that is sent again, on a fresh connection, is answered.
        let mut wire = connect().await;
        assert_eq!(wire.exchange(&get("/hello")).await.reply().status, 200);
        let counts = server.counts();
        assert_eq!((counts.connections, counts.answered), (2, 2));
        assert_eq!((counts.effects, counts.raced), (1, 1));
    }
}
